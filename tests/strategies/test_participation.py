"""Cohorts: exact laws, and generators that nobody else's random numbers touch."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from blackthorn.randomness import Stream, generator_of
from blackthorn.strategies import FixedParticipation, FullParticipation, PoissonParticipation
from blackthorn.strategies.participation import Participation

CLIENTS = [40, 10, 30, 20, 50]
SAMPLERS = [FullParticipation(), FixedParticipation(2), PoissonParticipation(0.5)]


def cohorts(
    participation: Participation, rounds: int, clients: list[int] = CLIENTS, seed: int = 1
) -> list[tuple[int, ...]]:
    return [
        tuple(
            participation.sample(
                clients, generator_of(Stream.PARTICIPATION, seed, server_round)
            ).clients
        )
        for server_round in range(1, rounds + 1)
    ]


def global_numpy_state() -> list[int]:
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    return [*state["state"]["key"].tolist(), state["state"]["pos"]]


def assert_follows(counts: list[int], probabilities: list[float]) -> None:
    """Chi-square: a right sampler fails for one seed in 10 000, and ours is fixed."""
    expected = np.array(probabilities) * sum(counts)
    assert expected.min() > 5
    assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_full_participation_is_everybody_in_order() -> None:
    assert cohorts(FullParticipation(), 3) == [(10, 20, 30, 40, 50)] * 3


def test_fixed_size_draws_every_subset_alike() -> None:
    drawn = Counter(cohorts(FixedParticipation(2), 4000))
    subsets = list(itertools.combinations(sorted(CLIENTS), 2))
    assert set(drawn) == set(subsets)
    assert_follows([drawn[subset] for subset in subsets], [1 / 10] * 10)


def test_fixed_size_is_everybody_where_fewer_are_known() -> None:
    assert cohorts(FixedParticipation(9), 2) == [tuple(sorted(CLIENTS))] * 2
    assert cohorts(FixedParticipation(2), 2, clients=[]) == [(), ()]


def test_fixed_size_is_exact_for_node_ids_of_64_bits() -> None:
    """NumPy makes floats of a list with integers on both sides of 2^63."""
    clients = [3, 2**63 + 5, 2**64 - 7, 2**53 + 1]
    for cohort in cohorts(FixedParticipation(3), 20, clients=clients):
        assert len(cohort) == 3
        assert set(cohort) <= set(clients)


def test_poisson_lets_each_join_on_its_own() -> None:
    """All 2^5 subsets, with probability q^|S| (1 - q)^(5 - |S|)."""
    rate = 0.4
    drawn = Counter(cohorts(PoissonParticipation(rate), 6000))
    subsets = [s for n in range(6) for s in itertools.combinations(sorted(CLIENTS), n)]
    law = [rate ** len(s) * (1 - rate) ** (5 - len(s)) for s in subsets]
    assert_follows([drawn[subset] for subset in subsets], law)


def test_the_size_of_a_poisson_cohort_is_binomial() -> None:
    sizes = Counter(
        len(c) for c in cohorts(PoissonParticipation(0.1), 3000, clients=list(range(30)), seed=4)
    )
    law = stats.binom(30, 0.1)
    counts = [sizes[n] for n in range(7)] + [sum(sizes[n] for n in range(7, 31))]
    assert_follows(counts, [*(float(law.pmf(n)) for n in range(7)), float(law.sf(6))])
    assert sizes[0] > 0  # an empty cohort is a cohort


def test_poisson_with_rate_one_is_everybody() -> None:
    assert cohorts(PoissonParticipation(1.0), 5) == [tuple(sorted(CLIENTS))] * 5


@pytest.mark.parametrize("participation", SAMPLERS)
def test_a_cohort_depends_on_seed_round_and_clients_alone(participation: Participation) -> None:
    before = cohorts(participation, 20)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 (the global generator is what must not matter)
    torch.manual_seed(3)
    assert cohorts(participation, 20) == before
    assert cohorts(participation, 20, clients=sorted(CLIENTS, reverse=True)) == before
    # One round alone gives what it gives after all the others.
    alone = participation.sample(CLIENTS, generator_of(Stream.PARTICIPATION, 1, 17))
    assert tuple(alone.clients) == before[16]


@pytest.mark.parametrize("participation", SAMPLERS)
def test_sampling_leaves_all_global_generators_alone(participation: Participation) -> None:
    states = (random.getstate(), global_numpy_state(), torch.get_rng_state())
    clients = list(CLIENTS)
    cohorts(participation, 5, clients=clients)
    assert random.getstate() == states[0]
    assert global_numpy_state() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert clients == CLIENTS


@pytest.mark.parametrize("participation", SAMPLERS[1:])
def test_rounds_and_seeds_differ(participation: Participation) -> None:
    one, other = cohorts(participation, 50), cohorts(participation, 50, seed=2)
    assert len(set(one)) > 5
    assert one != other
    # A round of one seed is not a later round of the next one.
    assert one[1:] != other[:-1]
    assert one[:-1] != other[1:]


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_fixed_cohort_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size = {size}"):
        FixedParticipation(size)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=f"rate = {rate}"):
        PoissonParticipation(rate)
