"""`blackthorn cluster`: a recipe as a real deployment on this machine, over gRPC."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from blackthorn.client_app.node_data import load_node_client
from blackthorn.installation import APP_ROOT
from blackthorn.launch.commands.progress import RoundPrinter
from blackthorn.launch.federation.app_bundle import COMPONENTS
from blackthorn.launch.federation.byzantine_nodes import (
    check_rogue,
    cluster_nodes,
    collusion,
    kept_policies,
)
from blackthorn.launch.federation.flower_cluster import DeploymentError, FlowerCluster, RunStatus
from blackthorn.recording.failure_reason import RunFailed, reason_of, withheld
from blackthorn.recording.folder_place import create_folder
from blackthorn.recording.operator_log import longest_run
from blackthorn.recording.privacy import privacy_of_dead_run, sample_privacy_of_dead_run
from blackthorn.recording.resume import note_resumable
from blackthorn.recording.run_folder import read_metrics, read_summary, write_failure
from blackthorn.recording.run_ledger import with_place_of_ledger
from blackthorn.reporting.run_report import publish
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig, to_mapping
from blackthorn.settings.key_facts import unread
from blackthorn.settings.privacy_checks import claims_privacy


def cluster(
    config: RunConfig,
    console: Console,
    *,
    data: Sequence[Path] = (),
    policy: Path | None = None,
    warm: bool = True,
    rogue: str = "",
) -> dict[str, Any]:
    """Run `config` on one SuperNode a client and return the summary.

    The last `num-byzantine` nodes run the Byzantine program in place of Flower's, or with `rogue`
    (behaviours of `blackthorn.attacks.rogue`, by commas) no SuperNode at all but the rogue process.
    `data` gives every node its own examples, `policy` every honest one the same policy. Raises
    ConfigError before anything is started, RunFailed if the run did not complete, DeploymentError
    if a process did not do its part.
    """
    config = deployed(config, data)
    _check_data(config, data)
    check_rogue(config, rogue)
    policies = {} if policy is None else kept_policies(config, policy, data)
    ready = _ready(config, console)
    if warm and sys.platform != "linux":
        told = f"on {sys.platform} every message starts a new Python, as by Flower's own programs: "
        console.print(f"{told}a round takes many seconds", highlight=False, soft_wrap=True)
        warm = False
    console.print(f"starting a SuperLink and {config.num_clients} SuperNodes...", highlight=False)
    with (
        _failure_on_record(ready),
        collusion(config, rogue) as accomplices,
        FlowerCluster(
            cluster_nodes(config, data, rogue, accomplices, policies),
            ready.folder,
            warm=warm,
            start_timeout=config.start_timeout,
        ) as flower,
    ):
        status, seconds = _run(flower, ready, console)
    # Nobody writes to the folder any more.
    return _summary(ready, status, seconds)


def run_on(flower: FlowerCluster, config: RunConfig, console: Console) -> dict[str, Any]:
    """Run `config` on a cluster that is up, and may have run others, and return the summary.

    Its nodes are as many as `cluster` starts for `config`, and the same programs.
    """
    ready = _ready(deployed(config), console)
    with _failure_on_record(ready):
        status, seconds = _run(flower, ready, console)
    return _summary(ready, status, seconds)


@dataclass(frozen=True)
class _Ready:
    """A run that has its folder; `done` is the last round of the run that it goes on with."""

    config: RunConfig
    folder: Path
    done: int
    warnings: Sequence[str] = ()


def _ready(config: RunConfig, console: Console) -> _Ready:
    """Check what can be checked beforehand, and make the folder."""
    prepared = prepare(config)
    config, folder = prepared.config, prepared.folder.resolve()
    places = {"output_dir": str(folder), "resume": str(folder) if config.resume else ""}
    create_folder(folder, config)
    if prepared.saved is not None:
        _set_logs_aside(folder)
    for note in prepared.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"run folder: {folder}", markup=False, highlight=False, soft_wrap=True)
    done = prepared.saved.state.server_round if prepared.saved else -1
    return _Ready(config.model_copy(update=places), folder, done, prepared.warnings)


@contextlib.contextmanager
def _failure_on_record(ready: _Ready) -> Iterator[None]:
    """What ends the run before its time is written to its folder."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        _fail(ready, reason_of(end, ready.config))
        note_resumable(end, ready.folder)
        raise
    except (DeploymentError, TimeoutError) as error:
        released = withheld("a process of the deployment did not do its part")
        raise _failed(ready, str(error), released) from error


def _run(flower: FlowerCluster, ready: _Ready, console: Console) -> tuple[RunStatus, float]:
    """How the run ended, and after how many seconds."""
    began = time.monotonic()
    run_id = flower.submit(APP_ROOT, to_mapping(ready.config), parts=COMPONENTS)
    timed = not claims_privacy(ready.config)
    with RoundPrinter(console, ready.config.num_server_rounds, timed=timed) as printer:
        tail = _MetricsTail(ready.folder, printer, ready.done)
        told: set[int] = set()

        def look(_status: RunStatus) -> None:
            tail.show_new()
            deaths = flower.deaths()
            for index in deaths.keys() - told:
                text = f"  client {index} is gone: {deaths[index]}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            told.update(deaths)

        status = flower.wait(run_id, longest_run(ready.config), look)
        tail.show_new()
    return status, time.monotonic() - began


def _summary(ready: _Ready, status: RunStatus, seconds: float) -> dict[str, Any]:
    summary = read_summary(ready.folder)
    if not status.completed or summary is None:
        reason = summary.get("reason") if summary else None
        reason = reason or f"Flower says {status} {status.details}".strip()
        where = f" (see {ready.folder / 'logs'})"
        raise _failed(ready, f"{reason}{where}", withheld(f"Flower says {status}"), reason)
    if summary["wall_seconds"] is not None:
        summary["wall_seconds"] = round(seconds, 3)
    return summary


def _failed(ready: _Ready, said: str, withheld: str, reason: str = "") -> RunFailed:
    """The error with which the run ends, once its folder says so too: `withheld` under a claim,
    else `reason`, or what is `said` at the terminal."""
    _fail(ready, withheld if claims_privacy(ready.config) else reason or said)
    error = RunFailed(said)
    note_resumable(error, ready.folder)
    return error


def _fail(ready: _Ready, reason: str) -> None:
    folder, config = ready.folder, ready.config
    # On a full disk this cannot be written either.
    with contextlib.suppress(OSError):
        privacy = privacy_of_dead_run(config, folder)
        examples = sample_privacy_of_dead_run(config, folder)
        written = write_failure(folder, config, reason, privacy, ready.warnings, examples)
        # A run that died before its server has written anything has nothing to report.
        if written and config.report and (folder / "config.toml").exists():
            publish(folder)


def _set_logs_aside(folder: Path) -> None:
    """Keep the logs of the processes that died: logs-1, logs-2, ... beside the new ones."""
    logs = folder / "logs"
    if logs.exists():
        number = 1 + len(list(folder.glob("logs-*")))
        # An earlier version's may be everybody's to read.
        logs.chmod(0o700)
        logs.rename(folder / f"logs-{number}")


def deployed(config: RunConfig, data: Sequence[Path] = ()) -> RunConfig:
    """What changes when other processes, in other folders, read the configuration.

    Raises ConfigError for what no cluster can do.
    """
    if config.num_byzantine and config.byzantine_set == "redrawn":
        raise ConfigError(
            "byzantine-set = redrawn is not allowed in a cluster, where the Byzantine nodes are "
            "programs of their own: set byzantine-set=fixed"
        )
    if config.num_byzantine and config.omniscient:
        raise ConfigError(
            "omniscient = true is not allowed in a cluster, where no Byzantine node sees what "
            "the honest ones send: set omniscient=false"
        )
    if data and len(data) != config.num_clients:
        raise ConfigError(
            f"--data was given {len(data)} times for {config.num_clients} clients: once each"
        )
    for path in data:
        if not path.exists():
            raise ConfigError(f"--data {path} does not exist")
    if config.task == "own-data" and not data:
        raise ConfigError("task = own-data needs --data FILE once for every client")
    data_dir = config.data_dir
    if unread(config, "data-dir") is None:
        data_dir = data_dir or os.environ.get("BLACKTHORN_DATA_DIR", "")
    return with_place_of_ledger(config.model_copy(update={"data_dir": _absolute(data_dir)}))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def _check_data(config: RunConfig, data: Sequence[Path]) -> None:
    """The files are at hand: what a node would refuse in its log is said here, before it starts."""
    for client, path in enumerate(data):
        try:
            load_node_client(config, {"client-id": client, "data-path": str(path.resolve())})
        except ValueError as error:
            raise ConfigError(f"--data: {error}") from None


class _MetricsTail:
    """Prints the rounds that metrics.jsonl has gained."""

    def __init__(self, folder: Path, printer: RoundPrinter, done: int) -> None:
        self._folder = folder
        self._printer = printer
        # The rounds before a run was resumed have been shown.
        self._last = done

    def show_new(self) -> None:
        for entry in read_metrics(self._folder):
            if entry["round"] > self._last:
                self._printer.round(entry)
                self._last = entry["round"]
