"""A class of one's own that has something in place of the mechanism claims nothing in Python
either: neither by what it inherits, nor by what its constructor or anybody else puts on it."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_grid import (
    LOCAL_LR,
    MemoryGrid,
    initial_model,
    quadratic_app,
    runs,
    trained,
    vector_of,
)
from noised_rounds import LR, START, C, Z, grid, plan, state_of

from blackthorn.strategies import (
    ClipNorm,
    CohortPlan,
    DPFedAvg,
    DPNormFedAvg,
    FederatedStrategy,
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    PrivacyPlan,
    RoundContext,
)
from blackthorn.strategies.own_mechanism import names_of
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.secure_averaging import SecureAveraging
from blackthorn.strategies.secure_plan import SecurePlan

OPTIONS: dict[str, Any] = {"local_rate": LR, "statistics": "server", "start_timeout": 2.0}
SECURE = SecurePlan(
    ClipNorm(C), Z, num_clients=8, rounds=3, participation=FullParticipation(), survivors=6
)
KINDS: list[tuple[type[PrivateAveraging], PrivacyPlan]] = [
    (PrivateAveraging, plan()),
    (DPFedAvg, plan()),
    (DPNormFedAvg, plan()),
    (SecureAveraging, SECURE),
]
OF_ALL_KINDS = pytest.mark.parametrize(("kind", "its_plan"), KINDS)


def methods_of(base: type) -> list[str]:
    return sorted(name for name in names_of(base) if not name.startswith("__"))


@OF_ALL_KINDS
def test_whatever_a_class_overrides_of_the_mechanism_is_named(
    kind: type[PrivateAveraging], its_plan: Any
) -> None:
    assert {"bound", "combine", "draw_cohort", "_noise", "quorum", "replies_needed"} < {
        *methods_of(kind)
    }
    for name in methods_of(kind):
        mine = type("Mine", (kind,), {name: getattr(kind, name)})
        with pytest.raises(ValueError) as raised:
            mine(its_plan, **OPTIONS)
        assert str(raised.value) == (
            f"Mine overrides {name} of PrivateAveraging, so that no privacy is claimed for it: "
            "leave the mechanism alone, or claim = False in its privacy plan (no figure is then "
            "told)"
        )
        # Whatever it has is allowed where nothing is claimed.
        unclaimed = mine(replace(its_plan, claim=False), **OPTIONS)
        assert unclaimed.privacy.claim is False


class Mixin:
    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
        del context
        return updates


class Mixed(Mixin, DPFedAvg):
    pass


class Further(Mixed):
    pass


@pytest.mark.parametrize("kind", [Mixed, Further])
def test_nor_may_a_class_beside_it_bring_it(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"overrides bound.* of PrivateAveraging, so that no priv"):
        kind(plan(), **OPTIONS)


class Added(DPFedAvg):
    """What is none of the mechanism: after the noise, and of its own."""

    length = 0.5

    def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
        super().__init__(privacy, **options)
        self.longest = 2 * self.length

    def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:
        del local_lr
        return vector.clamp(-self.longest, self.longest)


def test_what_comes_after_the_noise_is_the_user_s(tmp_path: Path) -> None:
    strategy = Added(plan(), ledger=tmp_path / "ledger.json", **OPTIONS)
    strategy.start(grid(), state_of(START), num_rounds=2, timeout=20)
    published = DPFedAvg(plan(), ledger=None, **OPTIONS)
    published.start(grid(), state_of(START), num_rounds=2, timeout=20)
    assert strategy.figure() == published.figure() == plan().figure(2)
    assert strategy.sentence() == published.sentence()


def told(strategy: PrivateAveraging) -> list[Callable[[], object]]:
    start = state_of(START)
    return [
        strategy.figure,
        strategy.sentence,
        strategy.local_figure,
        lambda: strategy.start(grid(), start, num_rounds=1, timeout=20),
        lambda: strategy.configure_train(1, start, {}, grid()),  # type: ignore[arg-type]
    ]


def same(value: Any) -> Any:
    return lambda *_: value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bound", same(torch.zeros(1))),
        ("_noise", same(0.0)),
        ("draw_cohort", same(CohortPlan.of([10]))),
        ("quorum", 3),
        ("needs_attestation", True),
        ("_weighting", "num-examples"),
        ("_denominator", "replies"),
        ("_enough_replies", 2),
        ("privacy", replace(plan(), noise_multiplier=9.0)),
    ],
)
@pytest.mark.parametrize("location", ["server", "client"])
def test_what_is_put_on_the_object_is_named_before_anybody_is_asked(
    name: str, value: Any, location: str
) -> None:
    strategy = DPFedAvg(plan(noise_location=location), **OPTIONS)
    if name == "needs_attestation":
        value = location == "server"
    setattr(strategy, name, value)
    for one in told(strategy):
        with pytest.raises(ValueError, match=f"DPFedAvg overrides {name} of PrivateAveraging"):
            one()
    assert strategy.ledger.charges == []


def test_what_is_put_on_the_object_between_rounds_ends_the_run() -> None:
    """Nothing that it would change is asked for or released."""
    strategy = DPFedAvg(plan(), **OPTIONS)
    strategy._observers.append(lambda report: setattr(strategy, "quorum", report.server_round))
    strategy._observers.append(
        lambda report: setattr(strategy, "_noise", same(0.0)) if report.server_round == 2 else None
    )
    with pytest.raises(ValueError, match="DPFedAvg overrides quorum of PrivateAveraging"):
        strategy.start(grid(), state_of(START), num_rounds=4, timeout=20)
    assert strategy.ledger.rounds == 1


class PastIt(DPFedAvg):
    """Its constructor is that of the base of all strategies."""

    def __init__(self, privacy: PrivacyPlan, **options: Any) -> None:
        FederatedStrategy.__init__(self, **options)
        self.privacy = privacy


def test_a_constructor_that_goes_past_the_mechanism_s_claims_nothing() -> None:
    strategy = PastIt(plan(), **OPTIONS)
    for one in told(strategy):
        with pytest.raises(ValueError, match="the constructor of PastIt has not called that of"):
            one()


class Announced(PrivacyPlan):
    def owed(self, replies: int) -> float:
        return 0.0 * super().owed(replies)


class Longer(ClipNorm):
    def in_gradient_units(self, local_lr: float) -> float:
        return 2 * super().in_gradient_units(local_lr)


class Often(PoissonParticipation):
    pass


PARTS: dict[str, Any] = {
    "privacy": {},
    "clip_norm": {"clip_norm": Longer(C)},
    "participation": {"participation": Often(0.5)},
}


@pytest.mark.parametrize("part", PARTS)
def test_nor_has_the_plan_methods_of_somebody_s_own(part: str) -> None:
    usual = vars(plan(**PARTS[part]))
    its_plan = Announced(**usual) if part == "privacy" else PrivacyPlan(**usual)
    with pytest.raises(ValueError, match=f"{part} is of class \\w+, so that no privacy is claimed"):
        DPFedAvg(its_plan, **OPTIONS)
    DPFedAvg(replace(its_plan, claim=False), **OPTIONS)


def test_a_plan_of_secure_aggregation_is_no_claim_of_a_server_that_sees_the_updates() -> None:
    """It says that the figure holds against the server, too."""
    assert "against everybody, the server too" in SECURE.sentence()
    for kind in (DPFedAvg, DPNormFedAvg):
        with pytest.raises(ValueError, match=r"privacy is of class SecurePlan, .* use PrivacyPlan"):
            kind(SECURE, **OPTIONS)
    fixed = replace(SECURE, participation=FixedParticipation(7))
    assert SecureAveraging(fixed, **OPTIONS).sentence().startswith("client-level")


class Divides(DPFedAvg):
    """By the number of replies, whatever it is told."""

    @property
    def _denominator(self) -> Any:
        return "replies"

    @_denominator.setter
    def _denominator(self, denominator: Any) -> None:
        del denominator


class TwoPlans(DPFedAvg):
    """The one that is looked at is not the one that it has."""

    @property
    def privacy(self) -> PrivacyPlan:
        return replace(plan(), noise_multiplier=9.0)

    @privacy.setter
    def privacy(self, its_plan: PrivacyPlan) -> None:
        vars(self)["privacy"] = its_plan


class Slotted(DPFedAvg):
    __slots__ = ("_registry",)


@pytest.mark.parametrize(
    ("kind", "name"), [(Divides, "_denominator"), (TwoPlans, "privacy"), (Slotted, "_registry")]
)
def test_what_an_object_holds_may_stand_in_no_class_of_one_s_own(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} overrides .*{name} of PrivateAveragi"):
        kind(plan(), **OPTIONS)


def test_a_run_s_own_changes_are_none() -> None:
    """Also over a death, with every attribute that a run sets."""
    first = DPFedAvg(plan(), **OPTIONS)
    first.start(grid(), state_of(START), num_rounds=1, timeout=20)
    state = first.state()
    first.start(grid(), state_of(START), num_rounds=2, timeout=20, from_state=state)
    assert first.figure() == plan().figure(2)


class Fickle(float):
    """A rate by which C, in parameter units, is a thousandth where the noise is drawn."""

    def __rtruediv__(self, other: float) -> float:
        asked_by = {frame.function for frame in inspect.stack()[:8]}
        return other / float(self) * (1e-3 if "_deviation" in asked_by else 1.0)


def test_a_rate_of_somebodys_own_class_takes_nothing_from_the_noise() -> None:
    reports: list[RoundReport] = []
    private = PrivacyPlan(
        ClipNorm(1.0, "parameter"),
        2.0,
        num_clients=4,
        rounds=1,
        participation=FullParticipation(),
        delta=1e-3,
    )
    strategy = DPFedAvg(
        private, local_rate=Fickle(LOCAL_LR), statistics="server", observers=[reports.append]
    )
    nodes = {10 + i: runs(quadratic_app(i)) for i in range(4)}
    strategy.start(MemoryGrid(nodes), initial_model(), 1)
    aggregate = reports[-1].aggregate
    assert aggregate is not None
    w = vector_of(initial_model())
    updates = [(w - trained(w, client)) / LOCAL_LR for client in range(4)]
    bound = 1.0 / LOCAL_LR
    clipped = [u * min(1.0, bound / float(np.linalg.norm(u))) for u in updates]
    # Of deviation 4 in each of nine numbers; it was 0.004.
    assert float(np.linalg.norm(aggregate.numpy() - np.mean(clipped, axis=0))) > 0.2
