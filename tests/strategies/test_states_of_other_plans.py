"""A state that another plan goes on from: what was not charged is under no claim, and of clients
that take turns no round is charged for less than it was."""

import json
import math
import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from noised_rounds import CLIENTS, LR, START, C, grid, plan, state_of
from scipy.optimize import brentq
from scipy.stats import norm
from test_secure_averaging import LossyGrid, config_of

from blackthorn.server_app.build import build_strategy
from blackthorn.strategies import (
    CorruptionBound,
    DPFedAvg,
    FullParticipation,
    Ledger,
    PoissonParticipation,
    RageFilter,
    Release,
    RotatingParticipation,
    RoundReport,
)
from blackthorn.strategies.ledger import LedgerInUse
from blackthorn.strategies.ledger_file import Entry, charges_of
from blackthorn.strategies.noise_record import Recorded
from blackthorn.strategies.run_state import RunState
from blackthorn.strategies.secure_averaging import SecureAveraging
from blackthorn.tasks.problem import load_problem

DELTA = 1e-5
FULL, TURNS = FullParticipation(), RotatingParticipation(2)


def built(*, aggregator: Any = None, places: dict[str, Path] | None = None, **of: Any) -> DPFedAvg:
    """A strategy of the plan that `of` changes; zero-out neighbours, whatever the participation."""
    its_plan = plan(**{"rounds": 12, "delta": DELTA, "neighbours": "zero-out", **of})
    given = {} if aggregator is None else {"aggregator": aggregator}
    return DPFedAvg(
        its_plan,
        local_rate=LR,
        statistics="server",
        start_timeout=2.0,
        **(places or {}),  # type: ignore[arg-type]
        **given,
    )


def go(strategy: DPFedAvg, rounds: int, state: RunState | None = None) -> list[RoundReport]:
    seen: list[RoundReport] = []
    strategy._observers.append(seen.append)
    strategy.start(grid(), state_of(START), num_rounds=rounds, timeout=20, from_state=state)
    return seen


class Untouched:
    """A grid that nobody may use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def refused(strategy: DPFedAvg, state: RunState, words: str) -> None:
    """In one line, before any client is asked, and nothing is charged."""
    with pytest.raises(ValueError, match=words) as caught:
        strategy.start(Untouched(), state_of(START), num_rounds=12, from_state=state)
    assert "\n" not in str(caught.value)
    assert strategy.ledger.rounds == 0


def gaussian_epsilon(multipliers: list[float]) -> float:
    """Of independent Gaussian releases together, in closed form (Balle and Wang, 2018)."""
    mu = math.sqrt(sum(z**-2 for z in multipliers))

    def over(epsilon: float) -> float:
        beyond = norm.logcdf(-mu / 2 - epsilon / mu)
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + beyond) - DELTA

    return brentq(over, 0.0, 1e4)


# Rounds that were not charged.

NOT_CHARGED = "does not say that what its run released was charged"


@pytest.mark.parametrize(
    "before",
    [
        {"claim": False, "noise_multiplier": 1e-6},
        {"claim": False, "noise_multiplier": 1e-6, "participation": TURNS},
        # What a robust rule releases is in no ledger, whatever else is claimed of it.
        {
            "aggregator": RageFilter(CorruptionBound(1)),
            "noise_location": "client",
            "noise_multiplier": 50.0,
        },
    ],
    ids=["no claim", "turns without a claim", "robust"],
)
def test_rounds_that_were_not_charged_are_not_gone_on_with_under_a_claim(
    before: dict[str, Any],
) -> None:
    """Their figure is infinite, and one that leaves them out is none of the released models."""
    part = before.get("participation", FULL)
    first = built(**{"participation": part, **before})
    go(first, 2)
    refused(built(participation=part, noise_multiplier=5.0), first.state(), NOT_CHARGED)


def test_a_ledger_from_before_such_rounds_does_not_count_them_either(tmp_path: Path) -> None:
    """The run began under a claim, and its ledger is there and its own."""
    places = {"ledger": tmp_path / "ledger.json"}
    first = built(participation=FULL, places=places)
    go(first, 0)
    between = built(participation=FULL, claim=False, noise_multiplier=1e-6)
    go(between, 2, first.state())
    refused(built(participation=FULL, places=places), between.state(), NOT_CHARGED)


def test_a_state_that_does_not_say_whether_its_rounds_were_charged_is_refused(
    tmp_path: Path,
) -> None:
    """As an earlier version left it."""
    first = built(participation=FULL, places={"ledger": tmp_path / "ledger.json"})
    go(first, 2)
    state = first.state()
    del state.values["own"]["ledger"]["charged"]
    later = built(participation=FULL, places={"ledger": tmp_path / "ledger.json"})
    with pytest.raises(ValueError, match=NOT_CHARGED):
        later.start(Untouched(), state_of(START), num_rounds=3, from_state=state)
    assert later.ledger.rounds == 2


def test_without_a_claim_any_such_state_is_gone_on_with() -> None:
    first = built(participation=FULL, claim=False)
    go(first, 2)
    assert len(go(built(participation=FULL, claim=False), 3, first.state())) == 1


def test_rounds_in_which_nobody_was_asked_are_charged_and_gone_on_with(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "participation": PoissonParticipation(1e-9),
        "neighbours": "add-remove",
        "places": {"ledger": tmp_path / "ledger.json"},
    }
    first = built(**options)
    assert [report.invited for report in go(first, 2)] == [[], []]
    second = built(**options)
    go(second, 3, first.state())
    assert second.ledger.rounds == 3


def test_a_secure_round_that_was_refused_is_not_charged_and_the_run_goes_on() -> None:
    """Nothing was released in it: fewer rounds are charged than the state has."""
    config = config_of(**{"num-server-rounds": 2, "secure-dropouts": 0.25})
    model = load_problem(config).model.module
    first = build_strategy(config, [])
    first.start(LossyGrid(config, {"masked": [0, 1, 2]}), model, 1, timeout=60)
    state = first.state()
    # In memory a ledger is of one process: the state is that of a run that has charged nothing.
    second = build_strategy(config, [])
    second.start(LossyGrid(config, {}), model, 2, timeout=60, from_state=state)
    assert isinstance(first, SecureAveraging)
    assert isinstance(second, SecureAveraging)
    assert (first.ledger.rounds, second.ledger.rounds) == (0, 1)


# Clients that take turns.


@pytest.mark.parametrize("takes", [True, False])
def test_who_takes_turns_does_so_for_the_whole_run(takes: bool) -> None:
    before, after = (FULL, TURNS) if takes else (TURNS, FULL)
    first = built(participation=before)
    go(first, 1)
    words = "clients take turns is" if takes else "clients take no turns is"
    refused(built(participation=after), first.state(), f"a plan by which {words} not allowed")


def test_with_other_noise_a_client_is_charged_for_all_rounds_that_it_is_in(tmp_path: Path) -> None:
    """Little and much in turns: one half of the clients has all rounds with little."""
    z_of_round = [1.0, 100.0] * 4
    state, its = None, defaultdict[int, list[float]](list)
    for t, z in enumerate(z_of_round, 1):
        strategy = built(
            participation=TURNS,
            noise_multiplier=z,
            accountant="pld",
            places={"ledger": tmp_path / "ledger.json"},
        )
        (report,) = [one for one in go(strategy, t, state) if one.server_round == t]
        for client in report.invited:
            its[client].append(z)
        state = strategy.state()
    assert len(its) == CLIENTS
    true = max(gaussian_epsilon(zs) for zs in its.values())
    figure = strategy.figure()
    assert figure is not None
    assert true <= figure.epsilon < 1.001 * true
    assert figure == Ledger(strategy.privacy, tmp_path / "ledger.json").figure()


def test_nobody_is_in_more_rounds_of_a_ledger_than_are_charged() -> None:
    """Random runs, their releases and links changing, in one ledger: of every run whoever had the
    worst turn, counted round by round."""
    rng = random.Random(3)
    for _ in range(300):
        groups = rng.choice([2, 3, 4])
        runs: dict[str, list[float]] = {"a" * 16: [], "b" * 16: []}
        entries: list[Entry] = []
        for _ in range(rng.randrange(1, 12)):
            run, z, n = rng.choice([*runs]), rng.choice([1.0, 2.0]), rng.randrange(1, 6)
            kind = rng.choice([1, groups, groups])
            link = rng.choice(["apart", "open"])
            entries.append(Entry(Release(z, groups=kind, link=link), n, run))  # type: ignore[arg-type]
            # A round with everybody is one for each group.
            runs[run] += [z if kind > 1 else -z] * n
        charged = sum(
            -(-n // one.groups) / one.noise_multiplier**2 for one, n in charges_of(entries)
        )

        assert charged >= sum(worst(rounds, groups) for rounds in runs.values()) - 1e-9


def worst(rounds: list[float], groups: int) -> float:
    """Of the clients of each turn the most of Σ 1/z² over the rounds that they are in."""
    return max(
        sum(z**-2 for t, z in enumerate(rounds) if z < 0 or t % groups == turn)
        for turn in range(groups)
    )


def test_turns_of_a_run_are_counted_together_whoever_charged_in_between() -> None:
    turns = Release(2.0, groups=2)
    entries = [
        Entry(turns, 3, "a" * 16),
        Entry(Release(2.0), 1, "b" * 16),
        Entry(turns, 3, "a" * 16),
    ]
    assert charges_of(entries) == [(turns, 6), (Release(2.0), 1)]


def test_a_round_on_record_is_charged_as_what_it_was(tmp_path: Path) -> None:
    """Its noise was of another plan, under which it was not charged any more."""
    led, noises = tmp_path / "ledger.json", tmp_path / "noises"

    def strategy(z: float) -> DPFedAvg:
        return built(
            participation=TURNS, noise_multiplier=z, places={"ledger": led, "noises": noises}
        )

    first = strategy(50.0)
    go(first, 1)
    state = first.state()
    second = strategy(0.05)
    before = led.read_bytes()
    record = second._turns
    assert record is not None
    keep = record._record.keep

    def replaced_then(server_round: int, recorded: Recorded) -> None:
        keep(server_round, recorded)
        led.rename(tmp_path / "own.json")
        led.write_bytes(before)

    record._record.keep = replaced_then  # type: ignore[method-assign]
    with pytest.raises(LedgerInUse, match="was replaced by another"):
        go(second, 2, state)
    shutil.move(tmp_path / "own.json", led)
    third = strategy(50.0)
    (report,) = go(third, 2, state)
    assert report.aggregate is not None
    noise = report.aggregate.double().numpy() * CLIENTS / 2
    assert noise.std() == pytest.approx(0.05 * C, rel=0.025)
    figure = third.figure()
    assert figure is not None
    assert figure.epsilon >= gaussian_epsilon([0.05])
    assert third.ledger.charges == [
        (Release(50.0, groups=2), 1),
        (Release(0.05, groups=2), 1),
    ]


@pytest.mark.parametrize("is_charged", [True, False])
def test_a_record_that_does_not_say_what_it_costs_is_released_only_where_it_was_charged(
    tmp_path: Path, is_charged: bool
) -> None:
    """As an earlier version kept it."""
    led, noises = tmp_path / "ledger.json", tmp_path / "noises"
    places = {"ledger": led, "noises": noises}
    states: list[RunState] = []
    ledgers: list[bytes] = []
    first = built(participation=TURNS, places=places)
    first._observers.append(lambda _: states.append(first.state()))
    first._observers.append(lambda _: ledgers.append(led.read_bytes()))
    go(first, 2)
    path = noises / "noise-00002.npz"
    with np.load(path) as held:
        kept = {name: held[name] for name in held if name != "charge"}
        assert json.loads(str(held["charge"]))["groups"] == 2
    np.savez(path, **kept)
    if not is_charged:
        led.write_bytes(ledgers[0])
    second = built(participation=TURNS, places=places)
    (report,) = go(second, 2, states[0])
    if is_charged:
        assert (report.skipped, second.ledger.rounds) == (None, 2)
    else:
        assert "did not note with how much noise" in str(report.skipped)
        assert (report.ends_run, second.ledger.rounds) == (True, 1)


def test_a_budget_is_kept_to_whatever_noise_the_rounds_have(tmp_path: Path) -> None:
    state, its, groups = None, defaultdict[int, list[float]](list), 4
    for t in range(1, 11):
        its_plan: dict[str, Any] = {
            "participation": RotatingParticipation(groups),
            "noise_multiplier": 1.0 if t % groups == 1 else 20.0,
            "max_epsilon": 9.0,
            "accountant": "pld",
        }
        strategy = built(**its_plan, places={"ledger": tmp_path / "ledger.json"})
        for report in go(strategy, t, state):
            for client in report.invited if report.aggregate is not None else ():
                its[client].append(its_plan["noise_multiplier"])
        state = strategy.state()
    true = max(gaussian_epsilon(zs) for zs in its.values())
    figure = strategy.figure()
    assert figure is not None
    assert true <= figure.epsilon <= 9.0
    assert strategy.ledger.rounds == 10
