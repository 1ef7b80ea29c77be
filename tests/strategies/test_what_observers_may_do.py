"""Under a claim nothing of what observers or own classes see of single updates comes back into what
is released: not by the report, not by what follows the noise, not by rates, steps or outputs."""

import threading
from typing import Any

import pytest
import torch
from noised_rounds import LR, START, grid, plan, state_of, weights

from blackthorn.strategies import DPFedAvg, LocalRate, OutputIterate, PrivacyPlan, ServerStep
from blackthorn.strategies.reports import RoundReport

OPTIONS: dict[str, Any] = {"local_rate": LR, "statistics": "server", "start_timeout": 2.0}


def run(strategy: DPFedAvg, rounds: int = 2) -> Any:
    return strategy.start(grid(), state_of(START), num_rounds=rounds, timeout=20)


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


class Tells(DPFedAvg):
    """What follows the noise in it would be the mean of the updates themselves."""

    def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
        self.seen: list[torch.Tensor] = []
        options["observers"] = [self.look, *options.get("observers", ())]
        super().__init__(privacy, **options)

    def look(self, report: RoundReport) -> None:
        assert report.updates is not None
        self.seen.append(report.updates.mean(dim=0))

    def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:
        del local_lr
        return self.seen[-1].to(vector) if self.seen else vector


def test_what_follows_the_noise_does_not_see_what_observers_have_seen() -> None:
    released: list[RoundReport] = []
    strategy = Tells(plan(), observers=[released.append], **OPTIONS)
    result = run(strategy, rounds=1)
    run(again := Tells(plan(claim=False), **OPTIONS), rounds=2)
    assert len(again.seen) == 2
    moved = torch.from_numpy(START - weights(result.arrays))
    assert released[0].aggregate is not None
    torch.testing.assert_close(moved / LR, released[0].aggregate.double(), rtol=1e-3, atol=1e-4)
    assert strategy.seen, "its observer has seen the updates"
    assert strategy.after_release is not strategy
    assert strategy.after_release.seen == []  # type: ignore[attr-defined]


def test_whom_the_server_knows_is_not_there_after_the_noise() -> None:
    class Counts(DPFedAvg):
        def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:
            del local_lr
            return vector * len(self._registry.online())

    with pytest.raises(AttributeError, match="_registry"):
        run(Counts(plan(), **OPTIONS))
    run(Counts(plan(claim=False), **OPTIONS))


class Smoothed(DPFedAvg):
    """A momentum of its own, of what is released."""

    def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
        super().__init__(privacy, **options)
        self.mean: torch.Tensor | None = None

    def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:
        del local_lr
        self.mean = vector if self.mean is None else 0.5 * self.mean + 0.5 * vector
        return self.mean


def test_attributes_of_one_s_own_live_on_from_one_release_to_the_next() -> None:
    seen: list[RoundReport] = []
    result = run(Smoothed(plan(), observers=[seen.append], **OPTIONS), rounds=2)
    first, second = (report.aggregate for report in seen)
    assert first is not None and second is not None
    moved = torch.from_numpy(START - weights(result.arrays))
    expected = LR * (first + 0.5 * first + 0.5 * second).double()
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_copied_claims_nothing() -> None:
    class Locked(DPFedAvg):
        def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
            super().__init__(privacy, **options)
            self.lock = threading.Lock()

    with pytest.raises(ValueError, match=r"Locked holds what cannot be copied .*no privacy is"):
        run(Locked(plan(), **OPTIONS))
    run(Locked(plan(claim=False), **OPTIONS))


def test_somebody_else_s_object_after_the_noise_claims_nothing() -> None:
    strategy = DPFedAvg(plan(), **OPTIONS)
    strategy.after_release = Tells(plan(claim=False), **OPTIONS)
    with pytest.raises(ValueError, match="overrides after_release of PrivateAveraging"):
        run(strategy)


class ByNorm(LocalRate):
    def after_round(self, rate: float, gained: float | None, server_round: int = 0) -> float:
        del gained, server_round
        return rate


class Steps(ServerStep):
    pass


class Outputs(OutputIterate):
    pass


@pytest.mark.parametrize(
    ("name", "one", "published"),
    [
        ("local_rate", ByNorm(LR), "LocalRate"),
        ("server_step", Steps(), "ServerStep"),
        ("output", Outputs(), "OutputIterate"),
    ],
)
def test_what_acts_on_rates_and_releases_is_as_published(
    name: str, one: Any, published: str
) -> None:
    options = {**OPTIONS, name: one}
    told = rf"{name} is of class {type(one).__name__}, so that no privacy .*use {published} as pub"
    with pytest.raises(ValueError, match=told):
        DPFedAvg(plan(), **options)
    run(DPFedAvg(plan(claim=False), **options))
    later = DPFedAvg(plan(), **OPTIONS)
    setattr(later, {"local_rate": "_rate", "server_step": "_step"}.get(name, "_output"), one)
    with pytest.raises(ValueError, match=told):
        run(later)
