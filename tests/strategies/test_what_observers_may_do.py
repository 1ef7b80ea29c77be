"""What an observer writes, into a report or a state, is its own: neither the run, nor what follows
the noise, nor another observer has it."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from memory_grid import MemoryGrid
from noised_rounds import CLIENTS, LR, OPTIONS, START, grid, plan, run, state_of, weights

from blackthorn.client_app.messages import read_round
from blackthorn.strategies import (
    DPFedAvg,
    OutputIterate,
    PrivacyPlan,
    RotatingParticipation,
    ServerStep,
)
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.run_state import RunState


def test_what_an_observer_writes_into_a_report_is_its_own() -> None:
    """Neither others' numbers nor the run's end are decided by who has seen the updates."""
    seen: list[RoundReport] = []

    def meddles(report: RoundReport) -> None:
        assert report.updates is not None
        report.told["mean_norm"] = float(report.updates.norm(dim=1).mean())
        report.metrics["accuracy"] = 1.0
        report.warnings.append("client 3 is there")
        report.rejected.clear()
        report.skipped, report.ends_run, report.aggregate = "no", True, None

    strategy = DPFedAvg(plan(), observers=[meddles, seen.append], **OPTIONS)
    run(strategy, rounds=3)
    assert [report.server_round for report in seen] == [1, 2, 3]
    for report in seen:
        assert "mean_norm" not in report.told
        assert report.warnings == []
        assert "accuracy" not in report.metrics
        assert report.skipped is None
        assert not report.ends_run
        assert report.aggregate is not None


def test_what_it_writes_into_tensors_is_its_own_as_well() -> None:
    seen: list[RoundReport] = []

    def overwrites(report: RoundReport) -> None:
        for value in (report.updates, report.aggregate, report.weights, report.model):
            assert value is not None
            value.fill_(1e6)

    strategy = DPFedAvg(plan(), observers=[overwrites, seen.append], **OPTIONS)
    result = run(strategy)
    for report in seen:
        for value in (report.updates, report.aggregate, report.weights, report.model):
            assert value is not None
            assert float(value.abs().max()) < 1e3
    np.testing.assert_array_equal(seen[-1].model.double().numpy(), weights(result.arrays))


class Late(DPFedAvg):
    """Steps along the release of the round before."""

    def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
        super().__init__(privacy, **options)
        self.last: torch.Tensor | None = None

    def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:
        del local_lr
        before, self.last = self.last, vector
        return 0 * vector if before is None else before


def test_nor_does_it_write_into_what_follows_the_noise_has_kept() -> None:
    released: list[torch.Tensor] = []

    def overwrites(report: RoundReport) -> None:
        assert report.updates is not None and report.aggregate is not None
        released.append(report.aggregate.clone())
        report.aggregate.copy_(report.updates.mean(dim=0))

    result = run(Late(plan(), observers=[overwrites], **OPTIONS))
    moved = torch.from_numpy(START - weights(result.arrays))
    torch.testing.assert_close(moved / LR, released[0].double(), rtol=1e-3, atol=1e-4)


def sends_ones(message: Message) -> Message:
    """The client's update is 1 everywhere, and its model float64."""
    asked = read_round(message)
    arrays = {"weight": Array(asked.arrays["weight"].numpy() - asked.local_lr)}
    metrics = MetricRecord({"num-examples": 1})
    return Message(
        RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message
    )


def test_a_round_that_is_done_again_is_what_it_was_whatever_was_written() -> None:
    """Also where the model's precision is the noise's own, so that neither is rounded."""
    states: list[RunState] = []
    released: list[torch.Tensor] = []

    def overwrites(report: RoundReport) -> None:
        assert report.aggregate is not None
        released.append(report.aggregate.clone())
        report.aggregate.fill_(1e6)
        states.append(strategy.state())

    turns = plan(participation=RotatingParticipation(2, 0), neighbours="zero-out", rounds=2)
    strategy = DPFedAvg(turns, observers=[overwrites], **OPTIONS)
    start = ArrayRecord({"weight": Array(np.zeros(50))})
    for state in (None, 0):
        strategy.start(
            MemoryGrid({10 + i: sends_ones for i in range(CLIENTS)}),
            start,
            num_rounds=2,
            timeout=20,
            from_state=None if state is None else states[state],
        )
    assert strategy.ledger.rounds == 2
    _, second, again = released
    torch.testing.assert_close(again, second, rtol=0, atol=0)


@pytest.mark.parametrize("rule", ["last", "uniform-average"])
def test_what_is_written_into_a_state_is_the_writer_s_own(rule: Any) -> None:
    seen: list[RoundReport] = []

    def overwrites(report: RoundReport) -> None:
        seen.append(report)
        for array in strategy.state().arrays.values():
            array[...] = 1e6

    step, output = ServerStep(momentum=0.5), OutputIterate(rule)
    strategy = DPFedAvg(plan(), observers=[overwrites], server_step=step, output=output, **OPTIONS)
    result = run(strategy, rounds=3)
    models = [START, *(report.model.double().numpy() for report in seen)]
    assert float(np.abs(models[-1]).max()) < 1e3
    expected = models[-1] if rule == "last" else np.mean(models[:3], axis=0)
    np.testing.assert_allclose(weights(result.arrays), expected, rtol=1e-5, atol=1e-5)


def test_nor_does_a_state_that_is_written_into_decide_which_iterate_is_best() -> None:
    """Neither one that the run has given, nor the one that it goes on from."""
    held: list[RunState] = []

    def overwrites(report: RoundReport) -> None:
        if report.server_round == 0:
            return
        for state in (strategy.state(), *held):
            state.values["output"]["best"]["accuracy"] = 0.0

    strategy = DPFedAvg(plan(), observers=[overwrites], output=OutputIterate("best"), **OPTIONS)

    def goes_down(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        del arrays
        return MetricRecord({"accuracy": 0.9 - 0.1 * server_round})

    for rounds in (2, 3):
        strategy.start(
            grid(),
            state_of(START),
            num_rounds=rounds,
            timeout=20,
            evaluate_fn=goes_down,
            from_state=held[0] if held else None,
        )
        assert strategy.output_round == 0
        held.append(strategy.state())
