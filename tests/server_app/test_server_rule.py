"""What the server makes of a round, as an attacker who knows the configuration has it."""

import pytest
import torch

from blackthorn.attacks import ServerRule
from blackthorn.server_app.build import server_rule
from blackthorn.settings.catalogue import GUARANTEES, named
from blackthorn.settings.config import make_config

RULES = ("mean", *GUARANTEES)
PRE_AGGREGATORS = (
    "none",
    "nearest-neighbour-mixing",
    "bucketing",
    "adaptive-clipping",
    "equal-lengths",
)


def turned(answer: ServerRule, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer to skewed updates [20, 3] laid into 5 dimensions at an angle, and the answer to
    the updates, laid there likewise."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.empty(20, 3, dtype=torch.float64).exponential_(generator=generator)
    placed = torch.linalg.qr(torch.randn(5, 3, generator=generator, dtype=torch.float64)).Q
    return answer(rows @ placed.T), answer(rows) @ placed.T


def answer_of(values: dict[str, str | int | float]) -> ServerRule:
    config = make_config({"num-clients": 20, "num-corrupt": 4, **values})
    return server_rule(config)(1, 0.1, torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_inner_products_turns_with_the_updates_and_no_other_does(rule: str) -> None:
    """The adaptive attack asks such a rule about coordinates in place of updates."""
    answer = answer_of({"aggregator": rule})
    found, expected = (
        torch.cat(each) for each in zip(*(turned(answer, seed) for seed in range(9)), strict=True)
    )
    apart = float((found - expected).norm() / expected.norm())
    assert answer.by_products == (apart < 1e-9), apart


@pytest.mark.parametrize("mixing", PRE_AGGREGATORS)
def test_what_comes_before_a_rule_asks_for_inner_products_alone(mixing: str) -> None:
    answer = answer_of({"aggregator": "caf", "pre-aggregator": mixing})
    assert answer.by_products
    torch.testing.assert_close(*turned(answer))


def test_of_some_coordinates_rage_asks_for_more_than_inner_products() -> None:
    assert answer_of({"aggregator": "rage"}).by_products
    assert not answer_of({"aggregator": "rage", "rage-coordinates": 10}).by_products


@pytest.mark.parametrize("algorithm", named(lambda facts: facts.plain))
def test_an_algorithm_that_has_updates_as_they_come_leaves_them_so(algorithm: str) -> None:
    answer = answer_of({"algorithm": algorithm})
    assert answer.by_products
    torch.testing.assert_close(*turned(answer))


def test_where_updates_are_bounded_first_nothing_is_said() -> None:
    for algorithm, bound in (
        ("biclip", {"algorithm-options": "high = 1"}),
        ("fat-clipping-pr", {"clip-norm": 1.0}),
    ):
        assert not answer_of({"algorithm": algorithm, "aggregator": "krum", **bound}).by_products
