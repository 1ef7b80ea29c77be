"""The adaptive attack: no vector that it could try does more harm, and no other attack does."""

import numpy as np
import pytest
import torch

from blackthorn import attacks
from blackthorn.attacks import ServerRule
from blackthorn.strategies import aggregation, clip

K, B = 20, 4


def robust(name: str, by_products: bool = False) -> ServerRule:
    return ServerRule(lambda updates: aggregation.get(name)(updates, B).vector, by_products)


clipped_mean = ServerRule(lambda updates: clip(updates, 2.0).mean(dim=0))

RULES = {
    "clipped mean": clipped_mean,
    **{name: robust(name) for name in ("rage", "trimmed-mean", "multi-krum", "geometric-median")},
}


def unlike(seed: int, d: int = 30) -> torch.Tensor:
    """K honest updates in five groups, each with a direction of its own, and one in common."""
    generator = np.random.default_rng(seed)
    groups = 3 * generator.standard_normal((5, d))
    rows = generator.standard_normal(d) + groups[np.arange(K) % 5]
    return torch.from_numpy(rows + 0.3 * generator.standard_normal((K, d)))


def generator() -> np.random.Generator:
    return np.random.default_rng(5)


def harm(rule: ServerRule, benign: torch.Tensor, sent: torch.Tensor) -> float:
    average = benign.mean(dim=0)
    return -float((rule(torch.cat([benign, sent])) - average) @ average)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RULES)
def test_no_other_attack_does_more_harm(name: str, seed: int) -> None:
    rows, rule = unlike(seed), RULES[name]
    benign, own = rows[B:], rows[:B]
    adaptive = attacks.adaptive(own, num_clients=K, generator=generator(), honest=benign, rule=rule)
    worst = harm(rule, benign, adaptive)
    for other in attacks.names("vector"):
        attack = attacks.get(other)
        assert isinstance(attack, attacks.VectorAttack)
        sent = attack(own, num_clients=K, generator=generator(), honest=benign, rule=rule)
        assert worst >= 0.98 * harm(rule, benign, sent), other


@pytest.mark.parametrize("seed", range(5))
def test_of_single_numbers_it_finds_the_worst_there_is(seed: int) -> None:
    """d = 1: all values can be tried. The trimmed mean's worst is whatever lies beyond the rest."""
    rows = unlike(seed, 1)
    benign, own, rule = rows[B:], rows[:B], robust("trimmed-mean")
    found = attacks.adaptive(own, num_clients=K, generator=generator(), honest=benign, rule=rule)
    reach = 60 * float(benign.std() + benign.abs().max())
    tried = [torch.full((B, 1), value) for value in np.linspace(-reach, reach, 4001)]
    most = max(harm(rule, benign, one.double()) for one in tried)
    assert harm(rule, benign, found) >= most * (1 - 1e-6)


def test_a_bound_on_lengths_is_used_up_against_the_mean() -> None:
    """The mean of clipped updates moves furthest by a vector along −h̄ that is at least as long."""
    rows = unlike(7)
    benign, own = rows[B:], rows[:B]
    found = attacks.adaptive(
        own, num_clients=K, generator=generator(), honest=benign, rule=clipped_mean
    )
    average = benign.mean(dim=0)
    exact = (-2.0 * average / average.norm()).repeat(B, 1)
    assert harm(clipped_mean, benign, found) >= 0.999 * harm(clipped_mean, benign, exact)


def test_colluders_that_know_only_each_other_still_turn_the_mean() -> None:
    rows = unlike(3)
    sent = attacks.adaptive(rows[:B], num_clients=K, generator=generator(), rule=clipped_mean)
    average = rows[B:].mean(dim=0)
    honest = clipped_mean(rows)
    assert clipped_mean(torch.cat([rows[B:], sent])) @ average < 0.8 * float(honest @ average)


def mean_without_copies(updates: torch.Tensor) -> torch.Tensor:
    """The mean of the clipped rows that have no other within a tenth of their length."""
    apart = torch.cdist(updates, updates) + 1e9 * torch.eye(len(updates), dtype=updates.dtype)
    alone = apart.min(dim=1).values > 0.1 * updates.norm(dim=1)
    return clip(updates[alone], 2.0).mean(dim=0)


without_copies = ServerRule(mean_without_copies)


def test_where_copies_are_thrown_away_each_sends_another_one() -> None:
    rows = unlike(7)
    benign, own = rows[B:], rows[:B]
    honest = float(without_copies(rows) @ benign.mean(dim=0))
    sent = attacks.adaptive(
        own, num_clients=K, generator=generator(), honest=benign, rule=without_copies
    )
    assert float(torch.pdist(sent).min()) > 0.1 * float(sent.norm(dim=1).max())
    assert without_copies(torch.cat([benign, sent])) @ benign.mean(dim=0) < 0.8 * honest


@pytest.mark.parametrize("omniscient", [True, False])
@pytest.mark.parametrize("name", ["mean", "rage", "caf", "geometric-median", "multi-krum"])
def test_by_coordinates_in_the_span_it_finds_what_it_finds_by_the_whole(
    name: str, omniscient: bool
) -> None:
    """A rule of inner products is asked about vectors as short as the span has dimensions."""
    rows = unlike(4, 300)
    benign, own = rows[B:], rows[:B]
    seen: list[int] = []

    def answer(updates: torch.Tensor) -> torch.Tensor:
        seen.append(updates.shape[1])
        return aggregation.get(name)(updates, B).vector

    sent = [
        attacks.adaptive(
            own,
            num_clients=K,
            generator=generator(),
            honest=benign if omniscient else None,
            rule=ServerRule(answer, by_products),
        )
        for by_products in (False, True)
    ]
    assert set(seen) == {300, 2 * K}
    torch.testing.assert_close(sent[1], sent[0], rtol=1e-6, atol=1e-8)


def test_an_update_of_zeros_is_sent_as_it_is() -> None:
    own = torch.zeros(B, 3)
    sent = attacks.adaptive(own, num_clients=K, generator=generator(), rule=clipped_mean)
    assert torch.equal(sent, own)


def test_without_the_rule_it_says_what_it_needs() -> None:
    attack = attacks.get("adaptive")
    assert isinstance(attack, attacks.VectorAttack)
    with pytest.raises(ValueError, match="attack adaptive needs the server's rule"):
        attack(torch.ones(2, 3), num_clients=4, generator=generator())
