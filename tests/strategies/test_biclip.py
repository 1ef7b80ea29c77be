"""BiClip: the map, coordinate by coordinate, at the clients' steps and at the server's."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.server_app.build import build_strategy, check_names
from blackthorn.server_app.evaluation import server_evaluation
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import BiClip, RoundReport, biclip
from blackthorn.strategies.attestation import SentRule
from blackthorn.strategies.local_rule import rule_of
from blackthorn.strategies.rounds import RoundContext
from blackthorn.tasks.problem import load_problem

# Zhang et al., Table 4: f = ½ (a x − b)² of the three clients.
CURVES = ((1.0, 4.0), (2.0, 1.0), (6.0, -1.0))
STEPS, RATE, ROUNDS, START = 7, 0.03, 12, 5.0
OPTIONS = {
    "steps": {"low": 0.5, "high": 2.0},
    "server": {"server-low": 0.02, "server-high": 0.1},
    "both": {"low": 0.5, "high": 2.0, "server-low": 0.02, "server-high": 0.1},
    "from above alone": {"high": 2.0, "server-high": 0.1},
}


def loop(x: float, low: float, high: float) -> float:
    """The map of one number, written as the paper says it."""
    if x == 0 or math.isnan(x):
        return x
    size = low if abs(x) < low else high if abs(x) > high else abs(x)
    return math.copysign(size, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(0.25, 2.0), (0.0, 2.0), (1.0, 1.0), (0.5, math.inf)])
def test_every_coordinate_is_brought_between_both_and_keeps_its_sign(
    dtype: torch.dtype, low: float, high: float
) -> None:
    values = [0.0, 0.1, -0.1, 0.25, 1.0, -1.5, 2.0, -7.0, 1e-30, math.inf, -math.inf, math.nan]
    x = torch.tensor([values, values[::-1]], dtype=dtype)
    expected = torch.tensor([[loop(v, low, high) for v in row] for row in x.tolist()], dtype=dtype)
    torch.testing.assert_close(biclip(x, low, high), expected, rtol=0, atol=0, equal_nan=True)


def config_of(kind: str, **more: Any) -> Any:
    options = ", ".join(f"{key} = {value}" for key, value in OPTIONS[kind].items())
    return make_config(
        {
            **{"algorithm": "biclip", "task": "least-squares", "dtype": "float64"},
            **{"num-clients": 3, "batch-size": 0, "local-steps": STEPS, "local-lr": RATE},
            **{"num-server-rounds": ROUNDS, "initial-point": START, "server-lr": 0.8},
            **{"algorithm-options": options, **more},
        }
    )


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_run_is_the_plain_loop(kind: str) -> None:
    options = OPTIONS[kind]
    inner = options.get("low", 0.0), options.get("high")
    outer = options.get("server-low", 0.0), options.get("server-high")
    w, expected = START, []
    for _ in range(ROUNDS):
        ends = []
        for a, b in CURVES:
            x = w
            for _ in range(STEPS):
                gradient = a * (a * x - b)
                x -= RATE * (gradient if inner[1] is None else loop(gradient, inner[0], inner[1]))
            ends.append(x)
        move = w - sum(ends) / 3
        w -= 0.8 * (move if outer[1] is None else loop(move, outer[0], outer[1]))
        expected.append(w)
    found: list[float] = []

    def watch(report: RoundReport) -> None:
        found.append(float(report.model[0]))

    config = config_of(kind)
    problem = load_problem(config)
    build_strategy(config, [watch]).start(
        EngineGrid(config, problem),
        ArrayRecord(problem.state()),
        num_rounds=ROUNDS,
        evaluate_fn=server_evaluation(problem),
    )
    assert found[-ROUNDS:] == pytest.approx(expected, rel=1e-12)


def test_the_server_lets_no_coordinate_be_larger_than_k_steps_make_it() -> None:
    strategy = BiClip(3, high=0.5)
    context = RoundContext(1, 0.1, torch.zeros(2))
    updates = torch.tensor([[1.0, -9.0], [4.0, 1.5]])
    assert strategy.bound(updates, context).tolist() == [[1.0, -1.5], [1.5, 1.5]]
    assert strategy.norm_bound(context).norm == pytest.approx(1.5 * 2**0.5)
    assert strategy.needs_attestation


def test_of_the_server_s_step_alone_clients_know_nothing() -> None:
    strategy = BiClip(3, server_high=0.5)
    context = RoundContext(1, 0.1, torch.zeros(2))
    assert strategy.local_rule(context).sent == SentRule("sgd")
    assert not strategy.needs_attestation
    updates = torch.tensor([[1.0, -9e9]])
    assert torch.equal(strategy.bound(updates, context), updates)


def test_the_rule_is_found_by_what_is_sent() -> None:
    sent = SentRule("biclip-gradient", {"low": 0.5, "high": 2.0, "local-steps": 3})
    w = torch.zeros(3)
    gradients = rule_of(sent).on_gradient(torch.tensor([[0.1, -7.0, 0.0]]), w[None], w)
    assert gradients.tolist() == [[0.5, -2.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("", "algorithm-options: set high, server-high or both"),
        ("low = 1.0, server-high = 1.0", "algorithm-options: low = 1.0 is not allowed: at most"),
        ("low = 2.0, high = 1.0", "algorithm-options: low = 2.0 is not allowed: at most high"),
        ("high = -1.0", "algorithm-options: high = -1.0 is not allowed: should be greater than 0"),
        ("hihg = 1.0", "unknown key hihg; did you mean high?"),
    ],
)
def test_wrong_thresholds_are_one_line(options: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_names(make_config({"algorithm": "biclip", "algorithm-options": options}))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


# Every algorithm and its numbers are in each seed's column.
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_the_figures_under_cauchy_noise_are_those_of_the_page(repository: Path, seed: int) -> None:
    page = (repository / "docs" / "clipping.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)`, (.*?) \| ([\d. |]+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for name, numbers, row in rows:
        values = dict(re.findall(r"([λlu]) = ([\d.]+)", numbers))
        bound = float(values.pop("λ", 0.0))
        keys = {"l": "low", "u": "high"}
        options = ", ".join(f"{keys[key]} = {value}" for key, value in values.items())
        figures = row.split(" | ")
        assert len(figures) == 3
        settings = {
            **{"algorithm": name, "clip-norm": bound, "algorithm-options": options},
            **{"seed": seed, "instruments": False},
        }
        recipe = repository / "recipes" / "fat-clipping-cauchy.toml"
        config = recipe_config(recipe, (), settings)
        problem, ends = load_problem(config), []
        build_strategy(config, [lambda report: ends.append(report.model)]).start(  # noqa: B023
            EngineGrid(config, problem),
            ArrayRecord(problem.state()),
            num_rounds=config.num_server_rounds,
        )
        found = float(ends[-1].double().square().sum())
        assert found == pytest.approx(float(figures[seed]), rel=0.02)
