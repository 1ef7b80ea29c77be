"""The risk that a cohort holds more corrupt clients than its rule assumes, and who is refused."""

import itertools
import math
from typing import Any

import pytest
from scipy import stats

from blackthorn.settings.cohort_risk import (
    fixed_tail,
    over_rounds,
    poisson_tail,
    unknown_risk,
)
from blackthorn.settings.config import ConfigError, RunConfig, make_config

TWO_HUNDRED: dict[str, Any] = {
    **{"num-clients": 200, "num-byzantine": 25, "attack": "sign-flip", "aggregator": "median"},
    **{"participation": "fixed", "clients-per-round": 20, "num-corrupt": 5},
    "num-server-rounds": 100,
}


def config_of(**more: Any) -> RunConfig:
    return make_config({**TWO_HUNDRED, **{key.replace("_", "-"): v for key, v in more.items()}})


@pytest.mark.parametrize(("cohort", "bound"), [(3, 0), (3, 1), (5, 2), (7, 2), (9, 3)])
def test_the_tail_of_a_fixed_cohort_is_what_counting_all_cohorts_gives(
    cohort: int, bound: int
) -> None:
    population, corrupt = 10, 4
    draws = list(itertools.combinations(range(population), cohort))
    over = sum(sum(c < corrupt for c in draw) > bound for draw in draws)
    assert fixed_tail(population, corrupt, cohort, bound) == pytest.approx(over / len(draws))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.34, 0.49])
def test_the_tail_of_a_poisson_cohort_is_what_counting_all_subsets_gives(
    rate: float, share: float
) -> None:
    population, corrupt = 9, 3
    total = 0.0
    for joins in itertools.product((0, 1), repeat=population):
        joined, found = sum(joins), sum(joins[:corrupt])
        if found > math.floor(share * joined + 1e-9):
            total += rate**joined * (1 - rate) ** (population - joined)
    found_by_sum = poisson_tail(population, corrupt, rate, lambda m: int(share * m + 1e-9))
    assert found_by_sum == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize(
    ("population", "corrupt", "cohort", "bound"),
    [(200, 25, 20, 5), (100, 20, 10, 3), (100_000, 9_000, 1_000, 110)],
)
def test_tails_are_scipys(population: int, corrupt: int, cohort: int, bound: int) -> None:
    expected = stats.hypergeom.sf(bound, population, corrupt, cohort)
    assert fixed_tail(population, corrupt, cohort, bound) == pytest.approx(expected, rel=1e-6)
    rate = cohort / population
    expected = stats.binom.sf(bound, corrupt, rate)
    assert poisson_tail(population, corrupt, rate, lambda _: bound) == pytest.approx(
        expected, rel=1e-6
    )


def test_twenty_of_two_hundred_are_not_safe_with_five() -> None:
    risk = fixed_tail(200, 25, 20, 5)
    assert risk == pytest.approx(0.0239, abs=5e-5)
    assert over_rounds(risk, 100) == pytest.approx(0.911, abs=5e-4)
    with pytest.raises(ConfigError, match=r"0\.0239, and 0\.911 in one of 100 rounds") as refused:
        config_of()
    line = str(refused.value)
    assert "\n" not in line
    cohort = int(line.partition("clients-per-round = ")[2].split()[0])
    bound = int(line.partition("num-corrupt = ")[2].split()[0])

    def whole(clients: int, assumed: int) -> float:
        return over_rounds(float(stats.hypergeom.sf(assumed, 200, 25, clients)), 100)

    assert whole(20, bound) <= 0.01 < whole(20, bound - 1)
    assert whole(cohort, cohort // 4) <= 0.01
    assert all(whole(m, m // 4) > 0.01 for m in range(20, cohort))
    # And what it says is allowed.
    config_of(num_corrupt=bound)
    config_of(clients_per_round=cohort, num_corrupt=cohort // 4)


@pytest.mark.parametrize(
    "more",
    [
        {"cohort_risk": 0.95},
        {"participation": "full", "clients_per_round": 0},
        {"aggregator": "mean", "num_corrupt": -1},
        {"num_corrupt": 0},
        {"corrupt_clients": 0},
        {"corrupt_clients": 5},
        {"num_server_rounds": 100, "num_byzantine": 5},
    ],
)
def test_who_takes_no_risk_or_accepts_it_goes_on(more: dict[str, Any]) -> None:
    config_of(**more)


def test_the_rounds_count() -> None:
    few = {"num_corrupt": 7, "cohort_risk": 0.02}
    config_of(num_server_rounds=5, **few)
    with pytest.raises(ConfigError, match=r"cohort-risk = 0\.02 is passed"):
        config_of(num_server_rounds=500, **few)


def test_a_poisson_cohort_is_refused_with_a_rate_that_is_safe() -> None:
    poisson = {"participation": "poisson", "clients_per_round": 0, "num_corrupt": -1}
    with pytest.raises(ConfigError, match=r"sample-rate = \S+ is the least") as refused:
        config_of(sample_rate=0.1, corrupt_fraction=0.3, **poisson)
    rate = float(str(refused.value).partition("sample-rate = ")[2].split()[0])
    config_of(sample_rate=rate, corrupt_fraction=0.3, **poisson)


def test_where_the_assumed_share_is_below_the_true_one_no_cohort_is_safe() -> None:
    with pytest.raises(ConfigError, match=r"no cohort is safe with 0\.1 of it"):
        config_of(num_corrupt=2)


def test_who_does_not_say_how_many_are_corrupt_is_told_that_nothing_is_known() -> None:
    silent = {"num_byzantine": 0, "attack": "none"}
    assert "set corrupt-clients to how many of num-clients = 200" in unknown_risk(
        config_of(**silent)
    )
    assert unknown_risk(config_of(**silent, corrupt_clients=0)) == ""
    assert unknown_risk(config_of(**silent, aggregator="mean", num_corrupt=-1)) == ""
    with pytest.raises(ConfigError, match="corrupt-clients = 201 is not allowed: at most"):
        config_of(corrupt_clients=201)
