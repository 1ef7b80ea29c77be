"""Under a claim what rates, steps, outputs and plans are made of is as published, down to the
numbers and texts in it: nothing in them hangs on what observers have seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from noised_rounds import LR, OPTIONS, START, grid, ones, plan, run, state_of, weights

from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    FullParticipation,
    LocalRate,
    OutputIterate,
    PrivacyPlan,
    RotatingParticipation,
    ServerStep,
)
from blackthorn.strategies.adaptive_threshold import AdaptiveThreshold
from blackthorn.strategies.judging import Judge
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.secure_averaging import SecureAveraging
from blackthorn.strategies.secure_plan import SecurePlan


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


class Number(float):
    """It is another number whenever it is asked, by what its class has been told."""

    factor = 1.0

    def __mul__(self, other: Any) -> Any:
        return float(self) * Number.factor * other

    __rmul__ = __mul__
    __radd__ = __sub__ = __mul__


@pytest.mark.parametrize(
    "options",
    [
        {"server_step": ServerStep(server_lr=Number(1.0), momentum=Number(0.5))},
        {"server_step": ServerStep(projection_radius=Number(1e3))},
        {"local_rate": LocalRate(Number(LR), decay=Number(0.5))},
        {"local_rate": Number(LR)},
        {"output": OutputIterate("weighted-average", contraction=Number(0.5))},
    ],
)
def test_numbers_of_somebody_s_own_class_are_python_s_from_the_start(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(report: RoundReport) -> None:
        assert report.updates is not None
        monkeypatch.setattr(Number, "factor", 1e3 * float(report.updates.norm()))

    private = plan(participation=FullParticipation())
    options = {**OPTIONS, "observers": [looks], **options}
    strategy = DPFedAvg(private, **options)
    result = strategy.start(grid(update=ones), state_of(START), num_rounds=2, timeout=20)
    assert Number.factor > 1e3
    assert float(np.abs(weights(result.arrays) - START).max()) < 10.0
    assert float(strategy._local_lr) <= LR


class Whole(int):
    pass


def test_nor_is_when_a_model_is_evaluated_such_a_number() -> None:
    strategy = DPFedAvg(plan(), evaluate_every=Whole(2), **OPTIONS)
    assert type(strategy._evaluate_every) is int


class Text(str):
    """Whoever writes it decides what it is equal to, and when."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("server_step.projection", {"server_step": ServerStep(projection=Text("ball"))}),  # type: ignore[arg-type]
        ("local_rate.when", {"local_rate": LocalRate(LR, when=Text("plateau"))}),  # type: ignore[arg-type]
        ("output.rule", {"output": OutputIterate(Text("last"))}),  # type: ignore[arg-type]
        ("output.judge.metric", {"output": OutputIterate(judge=Judge(Text("loss")))}),
    ],
)
def test_nor_are_texts_of_it_let_in(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name} is of class Text, so that no privacy is cla"):
        DPFedAvg(plan(), **{**OPTIONS, **options})
    DPFedAvg(plan(claim=False), **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("name", "its_plan"),
    [
        ("clip_norm.units", replace(plan(), clip_norm=ClipNorm(1.0, Text("gradient")))),  # type: ignore[arg-type]
        ("privacy.noise_location", plan(noise_location=Text("client"))),
    ],
)
def test_nor_into_the_plan(name: str, its_plan: PrivacyPlan) -> None:
    with pytest.raises(ValueError, match=f"^{name} is of class Text, so that no privacy is cla"):
        DPFedAvg(its_plan, **OPTIONS)


def test_numbers_of_numpy_s_are_taken() -> None:
    part, eight, six = np.float64(0.3), np.int64(8), np.int64(6)
    options = {
        **OPTIONS,
        "local_rate": LocalRate(part, part),
        "server_step": ServerStep(part, part, part),
        "output": OutputIterate("weighted-average", contraction=part),
    }
    turns: Any = RotatingParticipation(2, eight)  # type: ignore[arg-type]
    DPFedAvg(plan(participation=turns, neighbours="zero-out"), **options)
    adaptive = AdaptiveThreshold(part, part)
    DPFedAvg(plan(adaptive=adaptive, noise_multiplier=part, num_clients=eight), **options)
    everybody, bits = FullParticipation(), np.int64(16)
    secure: Any = {"survivors": six, "threshold": np.float64(2 / 3), "bits": bits}
    SecureAveraging(SecurePlan(ClipNorm(1.0), 1.5, 8, 3, everybody, **secure), **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RotatingParticipation(2, seed=1.5), "seed = 1.5"),  # type: ignore[arg-type]
        (lambda: DPFedAvg(plan(), **{**OPTIONS, "evaluate_every": 2.7}), "evaluate_every = 2.7"),
    ],
)
def test_what_would_have_to_be_rounded_or_read_is_refused(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(ValueError, match=f"{said} is not allowed") as caught:
        make()
    assert "\n" not in str(caught.value)
