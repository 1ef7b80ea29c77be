"""What `blackthorn server` shows of its federation: from Flower's Control API, the guard, and the
files of its runs, as `blackthorn status` has it. Nothing is counted here."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from blackthorn.flower_port.control_api import ControlApi, RunStatus, is_serving
from blackthorn.installation import CODE
from blackthorn.recording.run_figures import RunFigures, run_figures
from blackthorn.recording.run_notes import folder_of_run

from . import certificates, measures
from .addresses import LOOPBACK, Address
from .expiry import expired_at_the_server
from .measures import Sample
from .members import ServerSettings
from .run_log import RunLog
from .server_programs import DATABASE, SERVERAPPS, lack_of_space

# Of so many runs, the newest, figures are shown: each is some series for whoever stores them.
RUNS_SHOWN = 20
# Whoever asks more often is told the same again.
_FRESH_SECONDS = 5.0
_LOG_SECONDS = 2.0


def server_problem(settings: ServerSettings, health: Address) -> str:
    """What keeps clients and operators from being served; empty: nothing does."""
    if not is_serving(str(health)):
        return lack_of_space(settings.state) or "the SuperLink does not answer; see state/logs"
    return expired_at_the_server(settings.certs) if settings.certs is not None else ""


@dataclass(frozen=True)
class _Run:
    """A run at Flower, with what its folder tells; `claimed` of one whose folder is not known,
    too, of which nothing can be said."""

    id: int
    status: RunStatus
    figures: RunFigures

    @property
    def state(self) -> str:
        return str(self.status)


class ServerMetrics(Collector):
    """The measures of a server. What it cannot ask for at the moment is absent."""

    def __init__(self, settings: ServerSettings, health: Address) -> None:
        self._settings = settings
        self._health = health
        self._lock = threading.Lock()
        self._known: list[Metric] = []
        self._asked = -float("inf")
        # Of files that have not grown since, by folder: metrics.jsonl is read whole.
        self._figures: dict[Path, tuple[object, RunFigures]] = {}
        # Runs that left no note, once they are over: whether they never began.
        self._never_began: dict[int, bool] = {}

    def collect(self) -> list[Metric]:
        """All of it, at most some seconds old; of two who ask at once one asks on."""
        with self._lock:
            if time.monotonic() - self._asked > _FRESH_SECONDS:
                self._known = measures.families(self._samples())
                self._asked = time.monotonic()
            return self._known

    def _samples(self) -> list[Sample]:
        settings = self._settings
        problem = server_problem(settings, self._health)
        found: list[Sample] = [
            (measures.INFO, (CODE,), 1),
            (measures.READY, (), not problem),
        ]
        if settings.certs is not None:
            names = (certificates.SERVER_CERTIFICATE, certificates.CA_CERTIFICATE)
            found += measures.certificate_samples(*(settings.certs / name for name in names))
        if problem:
            # Each call would wait for its ten seconds.
            return found
        control = _control(settings)
        with contextlib.suppress(grpc.RpcError), contextlib.closing(control):
            states = Counter(str(node.status) for node in control.nodes())
            states.pop("unregistered", None)
            found += [(measures.NODES, (state,), n) for state, n in sorted(states.items())]
            runs = self._runs(control)
            found += _of_runs(runs)
            if not any(run.figures.claimed for run in runs):
                found += self._where_nothing_is_claimed(control)
        return found

    def _where_nothing_is_claimed(self, control: ControlApi) -> Iterator[Sample]:
        yield measures.DATABASE, (), _size(self._settings.state / DATABASE)
        for refusal in (control.guard("list") or {"refusals": []})["refusals"]:
            yield measures.REFUSALS, (refusal["key"], refusal["kind"]), refusal["count"]

    def _runs(self, control: ControlApi) -> list[_Run]:
        """All runs, the newest last."""
        return [
            _Run(run_id, status, self._figures_of(control, run_id, status))
            for run_id, status in control.runs().items()
        ]

    def _figures_of(self, control: ControlApi, run_id: int, status: RunStatus) -> RunFigures:
        folder = folder_of_run(self._settings.state / SERVERAPPS, run_id)
        if folder is None:
            return RunFigures(claimed=not self._has_not_begun(control, run_id, status))
        files = [_stamp(folder / name) for name in ("config.toml", "metrics.jsonl", "summary.json")]
        stamp = (status.finished, *files)
        kept, figures = self._figures.get(folder, (None, RunFigures(claimed=True)))
        if kept != stamp:
            figures = run_figures(folder, status.finished)
            self._figures[folder] = stamp, figures
        return figures

    def _has_not_begun(self, control: ControlApi, run_id: int, status: RunStatus) -> bool:
        """Whether a run without a note has asked nobody yet, or never did. Any other is an app's
        that may claim whatever it likes."""
        if not status.finished:
            return not status.running
        if run_id not in self._never_began:
            log = RunLog()
            for _ in log.read(control.log(run_id, _LOG_SECONDS)):
                pass
            self._never_began[run_id] = log.misconfigured
        return self._never_began[run_id]


def _of_runs(runs: list[_Run]) -> Iterator[Sample]:
    """What the table leaves of each run."""
    for state, number in sorted(Counter(run.state for run in runs).items()):
        yield measures.RUNS, (state,), number
    for run in runs[-RUNS_SHOWN:]:
        for measure, labels, value in _of_run(run):
            allowed = ("yes", "over") if run.status.finished else ("yes",)
            if not run.figures.claimed or measure.under_claim in allowed:
                yield measure, (str(run.id), *labels), value


def _of_run(run: _Run) -> Iterator[Sample]:
    figures = run.figures
    yield measures.STATE, (run.state,), 1
    if figures.planned:
        yield measures.PLANNED, (), figures.planned
    if figures.rounds is not None:
        yield measures.ROUNDS, (), figures.rounds
    if figures.skipped is not None:
        yield measures.SKIPPED, (), figures.skipped
    for phase, seconds in figures.seconds.items():
        yield measures.SECONDS, (phase,), seconds
    for (outcome, reason), number in figures.replies.items():
        yield measures.REPLIES, (outcome, reason), number
    for whose, epsilon in figures.epsilons.items():
        yield measures.EPSILON, (whose,), epsilon


def _control(settings: ServerSettings) -> ControlApi:
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(settings.control.host, settings.control.host)
    address = str(Address(host, settings.control.port))
    if settings.certs is None:
        return ControlApi(address)
    authority = (settings.certs / certificates.CA_CERTIFICATE).read_bytes()
    return ControlApi(address, authority, name=settings.host)


def _size(database: Path) -> int:
    """Of the database and of the log beside it, into which it writes first."""
    return sum(_stamp(path) or 0 for path in (database, Path(f"{database}-wal")))


def _stamp(path: Path) -> int | None:
    """A file's size; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return None
