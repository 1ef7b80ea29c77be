"""The table of section VI of Data and Diggavi: rules against attacks on MNIST."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blackthorn.experiments import byzantine_mnist, rage
from blackthorn.experiments.byzantine_mnist import ATTACKS, KEYS
from blackthorn.experiments.byzantine_verdicts import EXPECTED, REMOVED, expected_range
from blackthorn.experiments.study import Context, Scale, Value
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.settings.config import make_config, to_mapping

FULL = Scale()
_ran: dict[tuple[str, str, int], Value] = {}


def settings(attack: str, rule: str, draw: int = 0) -> Mapping[str, Any]:
    """A cell's, of the table's rounds alone."""
    cells = {cell.label: cell for cell in byzantine_mnist.all_cells(FULL)}
    return {**cells[attack, rule, draw].settings, "num-server-rounds": 25}


def measured(attack: str, rule: str, data_dir: str, draw: int = 0) -> Value:
    """The run behind a cell of the table, once a session."""
    if (attack, rule, draw) not in _ran:
        context = Context(data_dir, None)
        own = settings(attack, rule, draw)
        _ran[attack, rule, draw] = byzantine_mnist.attacked(own, context)
    return _ran[attack, rule, draw]


def accuracy(attack: str, rule: str, data_dir: str, draw: int = 0) -> float:
    return measured(attack, rule, data_dir, draw)["accuracy"][-1]


@pytest.mark.usefixtures("data_dir")
def test_the_recipe_is_the_table_s_setting(repository: Path) -> None:
    recipe = recipe_config(repository / "recipes" / "rage-mnist.toml", (), {})
    own = {key: value for key, value in settings("A.6", "rage").items() if key != "draw"}
    cell = make_config({**own, "aggregator": "auto"})
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
            config = make_config({k: v for k, v in cell.settings.items() if k != "draw"})
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
        assert value["corrupt removed"] == [100 if rule == "rage" else 0] * 2
        honest = 100 / 175 if rule == "rage" else 0
        assert value["honest removed"] == pytest.approx([honest] * 2)
    assert final["rage"] > final["mean"] + 3


ROWS = [(attack, rule) for attack, row in EXPECTED.items() for rule in row]


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "rule"), ROWS)
def test_every_rule_s_accuracy_is_the_table_s(data_dir: str, attack: str, rule: str) -> None:
    """Where the draw of the initial weights moves it by many points, its mean over five is."""
    draws = range(5) if isinstance(EXPECTED[attack][rule], tuple) else range(1)
    mean = np.mean([accuracy(attack, rule, data_dir, draw) for draw in draws])
    low, high = expected_range(attack, rule)
    assert low <= mean <= high


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["A.1", "A.2", "A.3", "A.4"])
def test_rage_comes_before_the_trimmed_mean_and_that_before_the_median(
    data_dir: str, attack: str
) -> None:
    rules = ("rage", "trimmed-mean", "median")
    best, middle, worst = (accuracy(attack, rule, data_dir) for rule in rules)
    assert best > middle > worst


@pytest.mark.slow
@pytest.mark.parametrize("attack", sorted(REMOVED))
def test_rage_removes_as_many_colluders_as_is_recorded(data_dir: str, attack: str) -> None:
    low, high, _ = REMOVED[attack]
    assert low <= np.mean(measured(attack, "rage", data_dir)["corrupt removed"]) <= high
