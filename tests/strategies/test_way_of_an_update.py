"""How many files a client's reply passes on the server until there is a new global model: what has
to be opened to follow one round, counted by what runs and not by what is written about it."""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest
from flwr.app import Message
from memory_grid import (
    LOCAL_LR,
    Answer,
    MemoryGrid,
    initial_model,
    quadratic_app,
    runs,
)

import blackthorn
from blackthorn.flower_port.transports import Delivery, Enough
from blackthorn.strategies import (
    Aggregate,
    ClipNorm,
    CohortPlan,
    DPNormFedAvg,
    FederatedStrategy,
    FullParticipation,
    GFedAvg,
    PrivacyPlan,
    Release,
    RoundContext,
    RoundReport,
    rounds,
)
from blackthorn.strategies.attestation import Attestation, SentRule
from blackthorn.strategies.messages import Asked
from blackthorn.strategies.screening import Contribution, Rejection, Screened

ROOT = Path(blackthorn.__file__).resolve().parent.parent
ROOMS = {path.resolve() for path in (ROOT / "blackthorn").iterdir() if path.is_dir()}

# From a Delivery on, in the order in which they come.
OF_EVERY_ROUND = [
    "flower_port/transports.py",
    "strategies/base.py",
    "strategies/rounds.py",
    "strategies/screening.py",
    "strategies/array_codec.py",
    "strategies/global_model.py",
]
OF_THE_MEAN = ["strategies/aggregation/mean.py", "strategies/aggregation/aggregate.py"]
OF_PRIVACY = [
    "strategies/private_averaging.py",
    "strategies/bounded_update.py",
    "strategies/bounding.py",
    "strategies/ledger.py",
    "strategies/noise.py",
]
# What nobody has to open for it: the names of random streams; how a reply comes to the transport,
# and a charge to the disk and to the accountant; what the run's beginning has learned of the link;
# how large a round's noise is by the plan; a threshold that may move, which gives nothing where it
# stays, as here.
BEHIND = {
    "blackthorn/randomness.py",
    "flower_port/pulling.py",
    "strategies/accounting.py",
    "strategies/adaptive_threshold.py",
    "strategies/durable_file.py",
    "strategies/enrolment.py",
    "strategies/enrolment_messages.py",
    "strategies/ledger_file.py",
    "strategies/noise_record.py",
    "strategies/privacy_loss.py",
    "strategies/release.py",
}
# What goes from step to step, and is known by its fields: a property of it is no step.
VALUES: set[type] = {
    *(Delivery, Enough, Asked, CohortPlan, RoundContext, Contribution, Rejection, Screened),
    *(Aggregate, Attestation, SentRule, PrivacyPlan, Release),
}
METHODS_OF_VALUES = {(one.__module__, one.__name__) for one in VALUES}


class Way:
    """The files of ours of which a function runs while `open`, but for what clients do."""

    def __init__(self) -> None:
        self.open = False
        self._seen: dict[CodeType, str | None] = {}
        self._at_a_client = threading.local()

    @property
    def files(self) -> set[str]:
        return {file for file in self._seen.values() if file is not None}

    def see(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.open or getattr(self._at_a_client, "yes", False):
            return
        code = frame.f_code
        if code not in self._seen:
            self._seen[code] = self._file(code, frame.f_globals["__name__"])

    def _file(self, code: CodeType, module: str) -> str | None:
        path = Path(code.co_filename).resolve()
        ours = any(room in path.parents for room in ROOMS)
        if not ours or (module, code.co_qualname.partition(".")[0]) in METHODS_OF_VALUES:
            return None
        return str(path.relative_to(ROOT))

    def client(self, answer: Answer) -> Answer:
        def unseen(message: Message) -> Message | None:
            self._at_a_client.yes = True
            try:
                return answer(message)
            finally:
                self._at_a_client.yes = False

        return unseen


@contextmanager
def traced(way: Way, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """From where replies are waited for to where the model has moved, in all threads."""

    def opening(collect: Callable[..., object]) -> Callable[..., object]:
        def collected(*arguments: object) -> object:
            way.open = True
            return collect(*arguments)

        return collected

    def closing(close: Callable[..., object]) -> Callable[..., object]:
        def closed(*arguments: object) -> object:
            try:
                return close(*arguments)
            finally:
                way.open = False

        return closed

    patch.setattr(rounds, "collect", opening(rounds.collect))
    patch.setattr(rounds, "close_round", closing(rounds.close_round))
    before = sys.getprofile()
    threading.setprofile(way.see)
    sys.setprofile(way.see)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def files_of_a_round(strategy: FederatedStrategy, patch: pytest.MonkeyPatch) -> set[str]:
    way = Way()
    apps = [quadratic_app(i, enrols={"client-id": i, "num-examples": 10}) for i in range(3)]
    grid = MemoryGrid({100 + i: way.client(runs(app)) for i, app in enumerate(apps)})
    reports: list[RoundReport] = []
    strategy._observers.append(reports.append)
    with traced(way, patch):
        strategy.start(grid, initial_model(), num_rounds=1, timeout=30)
    (report,) = reports
    assert len(report.accepted) == 3
    assert report.skipped is None
    return way.files


def test_a_mean_s_round_is_in_eight_files(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = GFedAvg(num_clients=3, identity="query", local_rate=LOCAL_LR)
    expected = {*OF_EVERY_ROUND, *OF_THE_MEAN}
    assert files_of_a_round(strategy, monkeypatch) - BEHIND == expected
    assert len(expected) <= 8


def test_a_private_round_is_in_eleven_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PrivacyPlan(ClipNorm(1.0), 1.0, 3, 10, FullParticipation())
    plan.figure()  # loads the accountant's libraries
    strategy = DPNormFedAvg(
        plan,
        ledger=tmp_path / "ledger.json",
        identity="query",
        local_rate=LOCAL_LR,
        statistics="server",
    )
    expected = {*OF_EVERY_ROUND, *OF_PRIVACY}
    assert files_of_a_round(strategy, monkeypatch) - BEHIND == expected
    assert len(expected) <= 11


@pytest.mark.parametrize("value", sorted(VALUES, key=str))
def test_what_goes_from_step_to_step_is_a_frozen_value(value: type) -> None:
    assert dataclasses.is_dataclass(value)
    assert value.__dataclass_params__.frozen  # type: ignore[attr-defined]
