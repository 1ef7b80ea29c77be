"""Whatever clients answer, the round names it and goes on with the others."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from memory_grid import (
    MemoryGrid,
    quadratic_app,
    runs,
    silence,
)
from rounds_by_hand import (
    DEADLINE,
    LONG,
    NODES,
    Diary,
    attacker,
    by_hand,
    close,
    honest_grid,
    outlier,
    run,
)

from blackthorn import attacks
from blackthorn.strategies import (
    FederatedStrategy,
    GFedAvg,
    Rage,
    Rejection,
)

# What clients may do.

REASONS = {
    "nan": "not finite",
    "infinite": "not finite",
    "wrong-shape": "weight: shape (7,), expected (2, 3)",
    "wrong-dtype": "weight: dtype complex64, expected float32",
    "missing-key": "missing entry 'bias'",
    "extra-key": "unexpected entry 'extra'",
    "empty-arrays": "missing entry 'weight' (4 missing)",
    "empty-record": "0 array records",
    "lying-header": "weight: shape (7,), expected (2, 3)",
    "lying-payload": "weight: shape (1099511627776,)",
    "object-array": "weight: dtype object, expected float32",
    "garbage": "the payload is not a NumPy array",
    "huge-count": "num-examples = 1e+30",
    "raise": "refuses to answer",
}
SILENT = {"slow", "exit"}


def test_every_misbehaviour_has_its_reason() -> None:
    # A huge but finite model is screening's to let through: bounds and filters are for it.
    assert {*REASONS, *SILENT, "huge"} == set(attacks.names("reply"))


@pytest.mark.parametrize("weighting", ["uniform", "num-examples"])
@pytest.mark.parametrize("name", REASONS)
def test_misbehaviour_is_named_and_changes_nothing(name: str, weighting: Any) -> None:
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = attacker(name)
    strategy = GFedAvg(num_clients=6, weighting=weighting, observers=[diary])
    found = run(strategy, grid, rounds=2)
    close(found, by_hand([range(5)] * 2)[-1])
    for report in diary.reports:
        assert [r.client for r in report.rejected] == [NODES[5]]
        assert REASONS[name] in report.rejected[0].reason
        assert report.skipped is None
        assert set(report.accepted) == set(NODES[:5])


def test_a_client_that_never_answers_is_named_and_changes_nothing() -> None:
    assert all(getattr(attacks.get(name), "absence", None) == "silence" for name in SILENT)
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = attacker("slow")
    began = time.monotonic()
    found = run(GFedAvg(num_clients=6, observers=[diary]), grid, rounds=1, timeout=DEADLINE)
    assert DEADLINE <= time.monotonic() - began < DEADLINE + 5
    close(found, by_hand([range(5)])[-1])
    assert diary.reports[0].rejected == [Rejection(NODES[5], "no reply by the deadline")]


def test_a_huge_model_is_rage_s_to_filter() -> None:
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = attacker("huge")
    found = run(Rage(num_corrupt=1, num_clients=6, observers=[diary]), grid)
    close(found, by_hand([range(5)] * 3)[-1])
    assert [report.filtered for report in diary.reports] == [[NODES[5]]] * 3
    assert [report.rejected for report in diary.reports] == [[]] * 3


@pytest.mark.parametrize("make", [lambda **o: Rage(1, **o), GFedAvg])
def test_an_update_that_overflows_ends_no_round(make: Callable[..., FederatedStrategy]) -> None:
    """w_i fits float32, (w - w_i)/η does not: as a row it would make every rule fail, always."""
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = outlier(5, factor=1e38)
    run(make(num_clients=6, local_rate=1e-3, observers=[diary]), grid)
    for report in diary.reports:
        assert [r.client for r in report.rejected] == [NODES[5]]
        assert "too large" in report.rejected[0].reason
        assert report.skipped is None


@pytest.mark.parametrize(
    ("code", "reason"), [(3, "no reply by the deadline"), (5, "its node is no longer connected")]
)
def test_errors_written_by_the_superlink_are_attributed(code: int, reason: str) -> None:
    """The first where a message's time is over just before the round's is."""

    def gone(message: Message) -> Message:
        error = Message(Error(code, "in Flower's words"), reply_to=message)
        error.metadata.__dict__["_src_node_id"] = 1
        return error

    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = gone
    close(
        run(GFedAvg(num_clients=6, observers=[diary]), grid),
        by_hand([range(5)] * 3)[-1],
    )
    assert diary.reports[0].rejected[0].client == NODES[5]
    assert diary.reports[0].rejected[0].reason == reason


def test_a_node_that_never_says_who_it_is_delays_no_round() -> None:
    apps = [quadratic_app(i, 10, {"client-id": i}) for i in range(5)]
    grid = MemoryGrid({NODES[i]: runs(app) for i, app in enumerate(apps)})
    grid.nodes[NODES[5]] = silence
    strategy = GFedAvg(identity="query", num_clients=5)
    began = time.monotonic()
    close(run(strategy, grid), by_hand([range(5)] * 3)[-1])
    assert time.monotonic() - began < LONG / 2


def test_a_reply_with_the_wrong_content_type_is_not_fatal() -> None:
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = lambda message: Message(
        RecordDict({"config": ConfigRecord({"a": 1})}), reply_to=message
    )
    close(
        run(GFedAvg(num_clients=6, observers=[diary]), grid),
        by_hand([range(5)] * 3)[-1],
    )
    assert "0 array records" in diary.reports[0].rejected[0].reason
