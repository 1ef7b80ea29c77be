"""Under a claim what follows the noise in an own class sees what is released alone, whatever its
constructor left and whatever observers have seen; and what its constructor left lives on."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest
import torch
from noised_rounds import LR, OPTIONS, START, plan, run, weights

from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    PrivacyPlan,
)
from blackthorn.strategies.reports import RoundReport


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


class CopiesAsItself:
    """It says that its copy is itself."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        self.seen = seen
        self.unpickled: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


SHARED: dict[str, Callable[[Any], Any]] = {
    "a lock": lambda strategy: (strategy, threading.Lock())[1],
    "a weak reference": weakref.ref,
    "what is closed over": lambda strategy: lambda: strategy,
    "a default": lambda strategy: lambda own=strategy.seen: own,
    "what is called in part": lambda strategy: functools.partial(lambda own: own, strategy.seen),
    "a generator": lambda strategy: (one for one in [strategy.seen]),
    "its own way of copying": lambda strategy: CopiesAsItself(strategy.seen),
}


class Shares(Tells):
    def __init__(self, privacy: PrivacyPlan, shared: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(privacy, **options)
        self.shared = shared(self)


@pytest.mark.parametrize("kind", SHARED)
def test_what_a_copy_would_share_claims_nothing(kind: str) -> None:
    told = r"^shared of Shares cannot be pickled \(.*\), so that no privacy is .*: make it data"
    with pytest.raises(ValueError, match=told):
        run(Shares(plan(), SHARED[kind], **OPTIONS))
    run(Shares(plan(claim=False), SHARED[kind], **OPTIONS))


class Holds(Tells):
    """All that is copied: data, what hangs together, itself, and what has a name in a module."""

    def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
        super().__init__(privacy, **options)
        self.again, self.me, self.method, self.append = (
            self.seen,
            self,
            self.scaled,
            self.seen.append,
        )
        self.layer, self.kind, self.function = torch.nn.Linear(2, 2), ClipNorm, np.sign
        self.drawn, self.generator = np.random.default_rng(3), torch.Generator().manual_seed(3)

    def scaled(self, vector: torch.Tensor) -> torch.Tensor:
        return vector * len(self.again)

    def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:
        del local_lr
        assert self.me is self and self.again is self.seen
        self.append(vector)
        return self.method(vector)


def test_what_a_constructor_left_is_copied_with_what_hangs_together() -> None:
    seen: list[RoundReport] = []
    result = run(strategy := Holds(plan(), observers=[seen.append], **OPTIONS))
    alone: Any = strategy.after_release
    assert alone.me is alone and alone.again is alone.seen
    assert alone.privacy == strategy.privacy and alone.privacy is not strategy.privacy
    assert alone.layer is not strategy.layer and alone.drawn is not strategy.drawn
    assert alone.kind is ClipNorm and alone.function is np.sign
    first, second = (report.aggregate for report in seen)
    assert first is not None and second is not None
    moved = torch.from_numpy(START - weights(result.arrays))
    expected = LR * (first + 2 * second).double()
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-4)


class KeepsItsOptions(Smoothed):
    def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
        super().__init__(privacy, **options)
        self.options = options


def test_observers_that_a_constructor_left_are_not_there_after_the_noise() -> None:
    """A run's own cannot be pickled, and have seen single updates."""
    seen: list[RoundReport] = []
    strategy = KeepsItsOptions(plan(), observers=[lambda report: seen.append(report)], **OPTIONS)
    run(strategy)
    assert len(seen) == 2
    kept = strategy.after_release.options  # type: ignore[attr-defined]
    assert kept == {**OPTIONS, "observers": [None]}


def test_somebody_else_s_object_after_the_noise_claims_nothing() -> None:
    strategy = DPFedAvg(plan(), **OPTIONS)
    strategy.after_release = Tells(plan(claim=False), **OPTIONS)
    with pytest.raises(ValueError, match="overrides after_release of PrivateAveraging"):
        run(strategy)
