"""The table of section VI of Data and Diggavi: rules against attacks on MNIST."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from blackthorn.experiments import byzantine_mnist, rage
from blackthorn.experiments.byzantine_mnist import ATTACKS, KEYS
from blackthorn.experiments.byzantine_verdicts import EXPECTED, REMOVED
from blackthorn.experiments.study import Context, Scale, Value
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.settings.config import make_config, to_mapping

FULL = Scale()
_ran: dict[tuple[str, str], Value] = {}


def settings(attack: str, rule: str) -> Mapping[str, Any]:
    cells = {cell.label: cell for cell in byzantine_mnist.all_cells(FULL)}
    return cells[attack, rule, 0].settings


def measured(attack: str, rule: str, data_dir: str) -> Value:
    """The run behind a cell of the table, once a session."""
    if (attack, rule) not in _ran:
        context = Context(data_dir, None)
        _ran[attack, rule] = byzantine_mnist.attacked(settings(attack, rule), context)
    return _ran[attack, rule]


def accuracy(attack: str, rule: str, data_dir: str) -> float:
    return measured(attack, rule, data_dir)["accuracy"][-1]


@pytest.mark.usefixtures("data_dir")
def test_the_recipe_is_the_table_s_setting(repository: Path) -> None:
    recipe = recipe_config(repository / "recipes" / "rage-mnist.toml", (), {})
    cell = make_config({**settings("A.6", "rage"), "aggregator": "auto"})
    assert to_mapping(recipe) == to_mapping(cell)


@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_is_a_configuration(quick: bool, request: pytest.FixtureRequest) -> None:
    """Rules and attacks by their names, under a number of corrupt clients that they stand."""
    if not quick:
        request.getfixturevalue("data_dir")  # a full run has no other data set than MNIST
    scale = Scale(quick=quick)
    found = set()
    for experiment in rage.PAPER.experiments:
        for cell in experiment.cells(scale):
            config = make_config(dict(cell.settings))
            attack, rule = str(cell.label[0]), str(cell.label[1])
            assert config.attack == KEYS.get(attack, "none")
            assert config.aggregator == rule
            assert config.corrupt_fraction * config.num_clients >= config.num_byzantine
            found.add((experiment.name, attack, rule))
    rules = ("mean", "rage", "trimmed-mean", "median", "krum")
    assert {("table", a, r) for a in ATTACKS for r in rules} <= found
    assert {(a, a, r) for a in ATTACKS for r in rules} <= found
    assert (("A.5", "A.5", "bulyan") in found) == (not quick)


def test_in_two_rounds_rage_removes_the_colluders_and_the_mean_loses(data_dir: str) -> None:
    """Under A.3 RAGE removes the 25 and one more; the mean, under attack, loses to it."""
    final = {}
    for rule in ("rage", "mean"):
        few = {**settings("A.3", rule), "num-server-rounds": 2}
        value = byzantine_mnist.attacked(few, Context(data_dir, None))
        assert len(value["accuracy"]) == 3
        final[rule] = value["accuracy"][-1]
        assert value["corrupt removed"] == (100 if rule == "rage" else 0)
        assert value["honest removed"] == pytest.approx(100 / 175 if rule == "rage" else 0)
    assert final["rage"] > final["mean"] + 3


# Seed 0 misses these (docs/attacks.md): the page's tolerance stays, and the day one is met is news.
MISSED = {
    ("A.2", "trimmed-mean"): "77.3, expected 72.9 within 3",
    ("A.2", "median"): "63.4, expected 50.8 within 10",
    ("A.6", "trimmed-mean"): "69.3, expected 62.9 within 3",
    ("A.6", "median"): "61.5, expected 50.6 within 10",
}
ROWS = [
    pytest.param(
        attack,
        rule,
        marks=[pytest.mark.xfail(strict=True, reason=MISSED[attack, rule])]
        if (attack, rule) in MISSED
        else [],
    )
    for attack, row in EXPECTED.items()
    for rule in row
]


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "rule"), ROWS)
def test_every_rule_s_accuracy_is_the_table_s(data_dir: str, attack: str, rule: str) -> None:
    steady = rule in ("rage", "mean", "trimmed-mean")
    points = (5 if attack == "A.1" else 3) if steady else 10
    assert accuracy(attack, rule, data_dir) == pytest.approx(EXPECTED[attack][rule], abs=points)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["A.1", "A.2", "A.3", "A.4"])
def test_rage_comes_before_the_trimmed_mean_and_that_before_the_median(
    data_dir: str, attack: str
) -> None:
    rules = ("rage", "trimmed-mean", "median")
    best, middle, worst = (accuracy(attack, rule, data_dir) for rule in rules)
    assert best > middle > worst


SHARES = [
    pytest.param(
        attack,
        marks=[pytest.mark.xfail(strict=True, reason="8 % with seed 0, expected none")]
        if attack == "A.2"
        else [],
    )
    for attack in sorted(REMOVED)
]


@pytest.mark.slow
@pytest.mark.parametrize("attack", SHARES)
def test_rage_removes_as_many_colluders_as_is_recorded(data_dir: str, attack: str) -> None:
    low, high, _ = REMOVED[attack]
    assert low <= measured(attack, "rage", data_dir)["corrupt removed"] <= high
