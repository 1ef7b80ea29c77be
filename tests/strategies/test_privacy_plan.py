"""One object for sampler, mechanism and accountant; draws from the system's entropy."""

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from blackthorn.strategies import (
    ClipNorm,
    FixedParticipation,
    FullParticipation,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
    calibrated,
    spent,
)
from blackthorn.strategies.accounting import Release
from blackthorn.strategies.noise import (
    SystemRandomness,
    client_deviation,
    longest_noised,
    missing_share,
)
from blackthorn.strategies.secure_plan import SecurePlan


def plan(**options: Any) -> PrivacyPlan:
    return PrivacyPlan(
        **{
            "clip_norm": ClipNorm(3.0),
            "noise_multiplier": 2.0,
            "num_clients": 1000,
            "rounds": 100,
            **options,
        }
    )


# Cohorts.


def test_poisson_cohorts_are_bernoulli_draws_for_each_id() -> None:
    ids = [5, 40, 7, 2**40]
    sampler = plan(participation=PoissonParticipation(0.3), num_clients=4)
    rounds = 20_000
    cohorts = [tuple(sampler.draw(ids, SystemRandomness()).clients) for _ in range(rounds)]
    assert all(list(c) == sorted(c) for c in cohorts[:100])
    sizes = np.bincount([len(c) for c in cohorts], minlength=5)
    law = stats.binom(4, 0.3).pmf(range(5)) * rounds
    assert stats.chisquare(sizes, law).pvalue > 1e-6
    for client in ids:
        joined = sum(client in cohort for cohort in cohorts)
        assert abs(joined - 0.3 * rounds) < 5 * math.sqrt(0.21 * rounds)
    assert sizes[0] > 0


def test_a_fixed_cohort_is_drawn_from_all_places() -> None:
    """Where half of the clients never enrolled, a client's chance stays n/m."""
    sampler = plan(participation=FixedParticipation(4), num_clients=8)
    rounds = 20_000
    counts = dict.fromkeys(range(4), 0)
    for _ in range(rounds):
        for client in sampler.draw(range(4), SystemRandomness()).clients:
            counts[client] += 1
    for joined in counts.values():
        assert abs(joined - 0.5 * rounds) < 5 * math.sqrt(0.25 * rounds)
    assert len(sampler.draw(range(8), SystemRandomness()).clients) == 4
    assert plan(num_clients=3).draw([9, 2, 4], SystemRandomness()).clients == [2, 4, 9]


# What a round is charged.


@pytest.mark.parametrize(
    ("options", "release", "denominator"),
    [
        ({"participation": PoissonParticipation(0.1)}, Release(2.0, 0.1), 100.0),
        ({"participation": FixedParticipation(100)}, Release(2.0), 100.0),
        (
            {"participation": FixedParticipation(100), "neighbours": "replace-one"},
            Release(1.0, drawn=(100, 1000)),
            100.0,
        ),
        ({"participation": FullParticipation()}, Release(2.0), 1000.0),
        ({"neighbours": "replace-one"}, Release(1.0), 1000.0),
        ({"participation": PoissonParticipation(1.0)}, Release(2.0), 1000.0),
    ],
)
def test_a_plan_charges_its_release_and_divides_by_its_fixed_cohort(
    options: dict[str, Any], release: Release, denominator: float
) -> None:
    sampler = plan(**options)
    assert sampler.release() == release
    assert sampler.cohort_size == pytest.approx(denominator)
    assert sampler.figure().epsilon == spent([(release, 100)], 1e-5).epsilon


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"participation": PoissonParticipation(0.1)}, "added or removed"),
        ({"participation": FixedParticipation(10)}, "become zero; no amplification"),
        ({"participation": FixedParticipation(10), "neighbours": "replace-one"}, "replaced"),
        ({"noise_location": "client"}, "become zero"),
    ],
)
def test_every_figure_names_its_neighbours_and_its_adversary(
    options: dict[str, Any], named: str
) -> None:
    assert named in plan(**options).sentence()
    assert "against everybody but the server" in plan(**options).sentence()


@pytest.mark.parametrize(
    ("options", "covered", "said"),
    [
        ({"participation": PoissonParticipation(0.1)}, True, []),
        ({"participation": FixedParticipation(10)}, True, []),
        ({"neighbours": "replace-one"}, True, []),
        ({"participation": FixedParticipation(1000), "neighbours": "replace-one"}, True, []),
        (
            {"participation": FixedParticipation(10), "neighbours": "replace-one"},
            False,
            ["when they were asked (k that pool it: a cohort of 10 of 1000 - k)"],
        ),
        (
            {"participation": PoissonParticipation(0.1), "noise_location": "client"},
            False,
            ["their shares of the noise (k that pool theirs: the multiplier 2.0 sqrt(1 - k/1000))"],
        ),
        (
            {
                "participation": FixedParticipation(10),
                "neighbours": "replace-one",
                "noise_location": "client",
            },
            False,
            ["a cohort of 10 of 1000 - k", "the multiplier 2.0 sqrt(1 - k/10)"],
        ),
    ],
)
def test_the_claim_says_whether_the_clients_may_be_the_adversary(
    options: dict[str, Any], covered: bool, said: list[str]
) -> None:
    own = plan(**options)
    assert own.covers_clients() == covered
    assert ("all other clients together included" in own.sentence()) == covered
    assert ("and the run's own clients, who know " in own.sentence()) != covered
    for part in said:
        assert part in own.sentence()


def test_what_is_left_against_clients_that_pool_what_they_know() -> None:
    """By counting: who is in the cohorts that hold none of k, and whose noise they do not know."""
    n, m, z = 2, 6, 2.0
    fixed = plan(participation=FixedParticipation(n), neighbours="replace-one", num_clients=m)
    for k in range(m - 1):
        possible = [c for c in combinations(range(m), n) if not {*range(1, k + 1)} & {*c}]
        release = fixed.release(colluding=k)
        if not possible:
            assert release == Release(z / 2)
            continue
        rate = sum(0 in c for c in possible) / len(possible)
        assert release.drawn is not None
        assert release.drawn[0] / release.drawn[1] == pytest.approx(rate)
        assert release.noise_multiplier == z / 2
    shared = plan(participation=PoissonParticipation(0.5), num_clients=m, noise_location="client")
    for k in range(m):
        unknown = sum(client_deviation(z, 1.0, m) ** 2 for _ in range(m - k))
        assert shared.release(colluding=k).noise_multiplier == pytest.approx(math.sqrt(unknown))
    assert shared.release().noise_multiplier == z
    assert plan().release(colluding=900) == plan().release()
    secure = SecurePlan(ClipNorm(1.0), z, num_clients=m, rounds=1, survivors=m - 1, delta=0.01)
    for wrong in (-1, m, 0.5):
        for each in (fixed, secure):
            with pytest.raises(ValueError, match=f"colluding = {wrong} is not allowed: an integer"):
                each.release(colluding=wrong)  # type: ignore[arg-type]
    one, none = fixed.figure(colluding=1).epsilon, fixed.figure().epsilon
    assert one > none


def test_calibration_of_a_plan() -> None:
    poisson = calibrated(plan(participation=PoissonParticipation(0.2)), 5.0)
    assert poisson.noise_multiplier == pytest.approx(2.148, rel=0.01)
    fixed = calibrated(plan(participation=FixedParticipation(100), neighbours="replace-one"), 14.05)
    assert fixed.noise_multiplier == pytest.approx(2.0, rel=0.01)


def test_the_local_figure_is_of_one_share_of_the_noise_a_round() -> None:
    """One message of z/(2√s) in each of T rounds, s the most that can be asked at once."""
    for kind, s in (
        (FixedParticipation(100), 100),
        (PoissonParticipation(0.1), 1000),
        (FullParticipation(), 1000),
    ):
        own = plan(participation=kind, noise_location="client", noise_multiplier=20.0)
        assert own.local_figure() == spent([(Release(20.0 / (2 * math.sqrt(s))), 100)], 1e-5)
        assert own.local_figure(150) == spent([(Release(20.0 / (2 * math.sqrt(s))), 150)], 1e-5)


# The mechanism's numbers.


def test_shares_of_the_noise() -> None:
    assert client_deviation(2.0, 3.0, 9) == pytest.approx(2.0)
    assert 9 * client_deviation(2.0, 3.0, 9) ** 2 == pytest.approx((2.0 * 3.0) ** 2)
    assert missing_share(8, 8) == 0
    assert missing_share(8, 6) == pytest.approx(0.25)
    assert missing_share(8, 0) == 1
    with pytest.raises(ValueError, match="9 clients cannot have a share each of 8"):
        missing_share(8, 9)
    with pytest.raises(ValueError, match="noise-shares = 0"):
        client_deviation(1.0, 1.0, 0)


def test_no_honest_noise_is_longer_than_allowed() -> None:
    """Chi: P(‖N(0, I_d)‖ > √d + √(2 ln 10^12)) ≤ 10^-12, and not far below what is needed."""
    for d in (1, 10, 7850):
        limit = longest_noised(0.0, 1.0, d)
        assert stats.chi(d).sf(limit) <= 1e-12
        assert stats.chi(d).sf(0.8 * limit) > 1e-13 or d > 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier = inf"),
        ({"delta": 0.0}, "delta = 0"),
        ({"delta": 0.5}, "delta = 0.5 breaks the claim: above 1/num_clients"),
        ({"num_clients": 0}, "num_clients = 0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"accountant": "moments"}, "accountant = 'moments'"),
        ({"noise_location": "moon"}, "noise_location = 'moon'"),
        ({"max_epsilon": 0.0}, "max_epsilon = 0"),
        ({"insecure_seed": 0}, "a seed for the noise breaks the claim"),
        ({"clip_norm": ClipNorm(math.inf)}, "clip_norm = inf"),
        ({"clip_norm": ClipNorm(7.2e-43)}, "clip_norm = 7.2e-43 is not allowed"),
        ({"clip_norm": ClipNorm(1e39)}, r"clip_norm = 1e\+39 is not allowed"),
        ({"delta": 1e-300}, "delta = 1e-300 is not allowed"),
        ({"participation": FixedParticipation(1001)}, "1001 of 1000"),
        (
            {"participation": FixedParticipation(10), "neighbours": "add-remove"},
            "neighbours = add-remove breaks the claim",
        ),
        (
            {"participation": PoissonParticipation(0.1), "neighbours": "replace-one"},
            "neighbours = replace-one breaks the claim",
        ),
    ],
)
def test_a_wrong_plan_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        plan(**options)
    assert "\n" not in str(caught.value)


# Numbers.


@pytest.mark.parametrize(
    ("options", "normal"),
    [
        ({"noise_multiplier": np.float32(1.5)}, {"noise_multiplier": 1.5}),
        ({"noise_multiplier": 2}, {"noise_multiplier": 2.0}),
        ({"num_clients": np.int64(7)}, {"num_clients": 7}),
        ({"rounds": np.uint8(7)}, {"rounds": 7}),
        ({"delta": np.float64(1e-6)}, {"delta": 1e-6}),
        ({"max_epsilon": np.float32(2.5)}, {"max_epsilon": 2.5}),
        (
            {"participation": PoissonParticipation(np.float32(0.5))},  # type: ignore[arg-type]
            {"participation": PoissonParticipation(0.5)},
        ),
        (
            {"participation": FixedParticipation(np.int64(3))},  # type: ignore[arg-type]
            {"participation": FixedParticipation(3)},
        ),
    ],
)
def test_numbers_of_any_kind_go_into_a_ledger_as_python_s(
    tmp_path: Path, options: dict[str, Any], normal: dict[str, Any]
) -> None:
    fixed = isinstance(options.get("participation"), FixedParticipation)
    neighbours = "replace-one" if fixed else None
    odd, usual = (plan(**given, neighbours=neighbours) for given in (options, normal))
    assert repr(odd) == repr(usual)
    ledger = Ledger(odd, tmp_path / "ledger.json")
    ledger.charge(odd.release())
    ledger.close()
    assert Ledger(usual, tmp_path / "ledger.json").charges == [(usual.release(), 1)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: plan(num_clients=5.0), "num_clients = 5.0 is not allowed: an integer from 1 to"),
        (lambda: plan(num_clients=5.5), "num_clients = 5.5 is not allowed: an integer from 1 to"),
        (lambda: plan(num_clients=0), "num_clients = 0 is not allowed: an integer from 1 to"),
        (lambda: plan(num_clients=True), "num_clients = True is not allowed"),
        (lambda: plan(rounds=10**13), "rounds = 10000000000000 is not allowed: an integer"),
        (lambda: plan(rounds="3"), "rounds = '3' is not allowed: an integer"),
        (lambda: plan(noise_multiplier="1"), "noise_multiplier = '1' is not allowed: a number"),
        (lambda: plan(noise_multiplier=math.nan), "noise_multiplier = nan is not allowed"),
        (lambda: plan(delta=None), "delta = None is not allowed: a number"),
        (lambda: plan(max_epsilon="8"), "max_epsilon = '8' is not allowed: a number"),
        (lambda: FixedParticipation(2.5), "cohort size = 2.5 is not allowed: an integer from 1"),  # type: ignore[arg-type]
        (lambda: PoissonParticipation("1"), "sample rate = '1' is not allowed: a number"),  # type: ignore[arg-type]
        (
            lambda: Ledger(plan(participation=PoissonParticipation(1e-17)), Path("new.json")),
            "sample rate = 1e-17 is not allowed with a ledger, which takes no rate below 1.11e-16",
        ),
    ],
)
def test_what_is_no_such_number_is_one_line_before_anything_starts(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
