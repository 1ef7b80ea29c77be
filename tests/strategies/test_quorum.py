"""What a run does when replies are too few, and when they are more than enough."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_runs import model, summary_of
from digits_runs import run as simulate
from flwr.app import Error, Message
from memory_grid import (
    LOCAL_LR,
    Answer,
    MemoryGrid,
    initial_model,
    quadratic_app,
    runs,
    silence,
    trained,
    vector_of,
)

from blackthorn.recording.client_history import STATES, read_history
from blackthorn.recording.run_counts import Counts, failures_in
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.settings.derived import invited
from blackthorn.strategies import GFedAvg, Rejection, screening
from blackthorn.strategies.base import FederatedStrategy
from blackthorn.strategies.options import Observer
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.run_state import NotEnoughReplies

LONG = 30.0


def tired_in(rounds: Sequence[int], client: int) -> Answer:
    """An honest node that raises in some rounds."""
    honest = runs(quadratic_app(client))

    def answer(message: Message) -> Message | None:
        if message.content.config_records["config"]["server-round"] in rounds:
            return Message(Error(2, "tired"), reply_to=message)
        return honest(message)

    return answer


def grid_with_outages(rounds: Sequence[int]) -> MemoryGrid:
    """Four nodes; three of them are tired in the same rounds."""
    nodes = {100 + i: tired_in(rounds if i else (), i) for i in range(4)}
    return MemoryGrid(nodes)


def noting(reports: list[RoundReport]) -> Observer:
    """Keeps the reports of all rounds but the evaluation of the initial model."""

    def note(report: RoundReport) -> None:
        if report.server_round > 0:
            reports.append(report)

    return note


def start(strategy: FederatedStrategy, grid: MemoryGrid, rounds: int) -> np.ndarray:
    """The last model; nothing is evaluated, which would wait for silent nodes."""
    result = strategy.start(
        grid, initial_model(), rounds, timeout=LONG, evaluate_fn=lambda *_: None
    )
    return vector_of(result.arrays)


def test_skip_then_fail_after_so_many_in_a_row() -> None:
    reports: list[RoundReport] = []
    strategy = GFedAvg(
        num_clients=4, min_replies=2, fail_after=2, local_rate=LOCAL_LR, observers=[noting(reports)]
    )
    with pytest.raises(NotEnoughReplies) as caught:
        start(strategy, grid_with_outages([2, 4, 5]), 9)
    assert [r.server_round for r in reports] == [1, 2, 3, 4, 5]
    assert [r.below_quorum for r in reports] == [False, True, False, True, True]
    assert str(caught.value).startswith(
        "too few replies in 2 rounds in a row, up to round 5, which had 1 replies, fewer than 2: "
    )
    assert str(caught.value).count("error 2: tired") == 3


def test_without_a_limit_every_such_round_is_skipped() -> None:
    strategy = GFedAvg(num_clients=4, min_replies=2, local_rate=LOCAL_LR)
    start(strategy, grid_with_outages(range(2, 9)), 8)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="fail_after = 0"):
        GFedAvg(fail_after=0)


def test_a_run_below_its_quorum_says_why_in_its_summary(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "num_byzantine": 2,
        "attack": "raise",
        "min_replies": 3,
        "below_quorum": "fail",
        "fail_after": 2,
    }
    with pytest.raises(NotEnoughReplies):
        simulate(tmp_path, **options)
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert summary["reason"].startswith("too few replies in 2 rounds in a row, up to round 2")
    assert "client 2: error 2: " in summary["reason"]
    assert summary["rounds_skipped"] == summary["rounds_completed"] == 2
    assert summary["failures"]["rounds"] == {"2 replies, fewer than 3": 2}
    assert sum(summary["failures"]["replies"].values()) == 4
    assert all(reason.startswith("error 2: ") for reason in summary["failures"]["replies"])


def test_a_client_that_makes_up_reasons_does_not_fill_the_summary() -> None:
    counts = Counts()
    for i in range(100):
        rejected = [Rejection(1, f"reason {i}")]
        counts.add(RoundReport(i, [1], [], rejected, 0.1, torch.zeros(1)))
    assert len(counts.failures["replies"]) == 21
    assert sum(counts.failures["replies"].values()) == 100
    lines = [{"rejected": [{"client": 1, "reason": f"reason {i}"}]} for i in range(100)]
    assert failures_in(lines) == counts.failures


# More than enough.


def test_the_first_good_replies_are_averaged_and_the_rest_is_surplus() -> None:
    """Two of four never answer: the round ends when the other two have, long before its end."""
    reports: list[RoundReport] = []
    nodes: dict[int, Answer] = {100 + i: runs(quadratic_app(i)) for i in range(2)}
    grid = MemoryGrid({**nodes, 102: silence, 103: silence})
    strategy = GFedAvg(
        num_clients=4, enough_replies=2, local_rate=LOCAL_LR, observers=[noting(reports)]
    )
    began = time.monotonic()
    found = start(strategy, grid, 1)
    assert time.monotonic() - began < LONG / 2
    assert reports[0].invited == [100, 101, 102, 103]
    assert reports[0].accepted == [100, 101]
    assert reports[0].surplus == [102, 103]
    assert reports[0].rejected == []
    w = np.arange(9) / 4
    np.testing.assert_allclose(found, (trained(w, 0) + trained(w, 1)) / 2, rtol=2e-5, atol=2e-5)


def test_a_reply_that_does_not_count_ends_no_round() -> None:
    reports: list[RoundReport] = []
    nodes: dict[int, Answer] = {100 + i: runs(quadratic_app(i)) for i in range(2)}
    grid = MemoryGrid({**nodes, 102: tired_in([1], 2)})
    strategy = GFedAvg(
        num_clients=3, enough_replies=2, local_rate=LOCAL_LR, observers=[noting(reports)]
    )
    start(strategy, grid, 1)
    assert reports[0].accepted == [100, 101]
    # Whether the tired one was heard before the round was over is chance.
    assert [*reports[0].surplus, *(r.client for r in reports[0].rejected)] == [102]


OVERSAMPLED: dict[str, Any] = {
    "num_clients": 8,
    "participation": "fixed",
    "clients_per_round": 3,
    "oversample": 1.9,
    "num_server_rounds": 4,
}


def test_oversampling_in_a_simulation(tmp_path: Path) -> None:
    entries = simulate(tmp_path / "one", **OVERSAMPLED)
    for entry in entries:
        assert (entry["invited"], entry["replied"], len(entry["surplus"])) == (6, 3, 3)
        assert entry["rejected"] == []
    # Not always the same ones, nor those with the lowest ids.
    assert len({tuple(entry["surplus"]) for entry in entries}) > 1
    summary = summary_of(tmp_path / "one")
    assert summary["clients"] == {"invited": 24, "replied": 12, "rejected": 0, "surplus": 12}
    history = read_history(tmp_path / "one")
    assert history is not None
    assert int((history.states == STATES.index("surplus")).sum()) == 12
    again = simulate(tmp_path / "two", **OVERSAMPLED)
    assert [e["surplus"] for e in again] == [e["surplus"] for e in entries]
    np.testing.assert_array_equal(model(tmp_path / "one"), model(tmp_path / "two"))


def test_those_who_fail_are_replaced_from_the_surplus(tmp_path: Path) -> None:
    options = {**OVERSAMPLED, "num_byzantine": 3, "attack": "raise"}
    for entry in simulate(tmp_path, **options):
        assert entry["replied"] == 3
        heard = entry["replied"] + len(entry["rejected"])
        assert heard + len(entry.get("surplus", ())) == entry["invited"] == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"participation": "full", "clients-per-round": 0}, "set participation = fixed"),
        ({"oversample": 3.0}, "9 clients would be invited, at most num-clients = 8"),
        ({"oversample": 0.5}, "oversample = 0.5"),
        (
            {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 1.0},
            "whose cohort is drawn",
        ),
        (
            {"algorithm": "fa-ld"},
            "oversample = .* with algorithm fa-ld: leave it 1.0",
        ),
        ({"aggregator": "median", "corrupt-fraction": 0.2}, "with corrupt-fraction"),
        ({"fail-after": 0}, "fail-after = 0"),
        ({"below-quorum": "wait"}, "below-quorum = .*wait"),
        ({"state-every": -2}, "state-every = -2"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    values = {key.replace("_", "-"): value for key, value in OVERSAMPLED.items()}
    with pytest.raises(ConfigError, match=words):
        make_config({**values, **options})


def test_under_a_claim_nothing_may_tell_how_many_took_part() -> None:
    private = {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 1.0}
    with pytest.raises(ConfigError, match="below-quorum = fail breaks the claim"):
        make_config({**private, "below-quorum": "fail"})


def test_eleven_tenths_of_ten_are_eleven() -> None:
    values = {"num-clients": 20, "participation": "fixed", "clients-per-round": 10}
    assert invited(make_config({**values, "oversample": 1.1})) == 11


@pytest.mark.parametrize("enough", [None, 2])
def test_a_reply_is_screened_once(enough: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends the round before its deadline, or that would have, had it counted."""
    screened: list[object] = []
    screen = screening.screen_reply

    def counted(message: Message, *arguments: Any) -> Any:
        screened.append((message.metadata.src_node_id, message.metadata.group_id))
        return screen(message, *arguments)

    monkeypatch.setattr(screening, "screen_reply", counted)
    strategy = GFedAvg(num_clients=4, enough_replies=enough, local_rate=LOCAL_LR)
    start(strategy, grid_with_outages([2]), 3)
    assert len(screened) == len(set(screened))
    assert len(screened) >= 3 * (enough or 4) - 1
