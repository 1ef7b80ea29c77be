"""RAGE and its rivals under six attacks (Data and Diggavi, section VI, Figures 3 and 4)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blackthorn.attacks import redrawn_corrupt
from blackthorn.experiments.engine_run import EngineRun, run_alone
from blackthorn.experiments.study import (
    Cell,
    Context,
    Scale,
    Value,
)
from blackthorn.settings.config import make_config
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.labelled import LabelledTask, evaluate
from blackthorn.tasks.problem import Problem, load_problem

# 200 clients, each with 1000 images of three digits; 25 of them lie, others in every round.
SETTING: dict[str, str | int | float] = {
    "algorithm": "rage",
    "model": "mlp-25",
    "partition": "dominant-label",
    "num-clients": 200,
    "num-server-rounds": 25,
    "local-steps": 7,
    "batch-size": 128,
    "local-lr": 0.08,
    "local-lr-decay": 0.96,
    "local-lr-decay-when": "plateau",
    "local-lr-plateau": 0.001,
    "corrupt-fraction": 0.125,
    "rage-stop": "appendix-f",
    "byzantine-set": "redrawn",
}
NUM_BYZANTINE = 25
# The table is of these first rounds; the figures' curves go on to 40 epochs, a client's 1000 images
# once each, of which a round takes 7 · 128.
TABLE_ROUNDS = 25
CURVE_ROUNDS = 45
# A fifth of the clients, and larger steps that learn as much in fewer rounds.
QUICK: dict[str, str | int | float] = {
    "num-clients": 40,
    "num-server-rounds": 15,
    "batch-size": 64,
    "local-lr": 0.16,
}
QUICK_BYZANTINE = 5
DIGITS: dict[str, str | int | float] = {"examples-per-client": 100, "batch-size": 32}

ATTACKS = {
    "A.1": "random gradient",
    "A.2": "reverse average",
    "A.3": "gradient shift",
    "A.4": "all ones",
    "A.5": "Baruch",
    "A.6": "reverse scaled average",
}
KEYS = {name: kind.lower().replace(" ", "-") for name, kind in ATTACKS.items()}
FIGURES = {name: f"Figure {3 if name < 'A.4' else 4}" for name in ATTACKS}
NONE = "none"
RAGE, MEAN, TRIMMED, MEDIAN, KRUM, BULYAN = (
    *("rage", "mean", "trimmed-mean", "median", "krum", "bulyan"),
)
RULES = (MEAN, RAGE, TRIMMED, MEDIAN, KRUM)


def rules_against(attack: str, scale: Scale) -> tuple[str, ...]:
    """The rules that are measured, of those that a run may be configured with; Bulyan, which is
    slow, in A.5 and in full alone."""
    if attack == NONE:
        return (MEAN, RAGE)
    return (*RULES, BULYAN) if attack == "A.5" and not scale.quick else RULES


def all_cells(scale: Scale) -> list[Cell]:
    """Every attack."""
    return cells(scale, tuple(ATTACKS))


def cells(scale: Scale, attacks: Sequence[str]) -> list[Cell]:
    """Every rule under the attacks, and without one; a run a draw of the initial weights and seed.

    A seed's first draw is the model that the product makes of the seed; it alone goes on to the
    figures' last round.
    """
    task = scale.data_set("mnist")
    values = {**SETTING, "task": task, **(QUICK if scale.quick else {})}
    values |= DIGITS if task == "digits" else {}
    corrupt = scale.choose(NUM_BYZANTINE, QUICK_BYZANTINE)
    found = []
    for attack in (NONE, *attacks):
        lies = {"attack": KEYS.get(attack, NONE), "num-byzantine": 0 if attack == NONE else corrupt}
        for rule in rules_against(attack, scale):
            cost = scale.choose({KRUM: 30, MEDIAN: 45, BULYAN: 120}.get(rule, 25), 3)
            for run, (seed, draw) in enumerate(_drawn(scale)):
                if draw and rule == BULYAN:
                    continue  # slow, and nothing was known of it beforehand
                keys = {**values, **lies, "aggregator": rule, "seed": seed, "draw": draw}
                if draw == 0 and not scale.quick:
                    keys["num-server-rounds"] = CURVE_ROUNDS
                rounds = CURVE_ROUNDS if draw == 0 else TABLE_ROUNDS
                found.append(Cell((attack, rule, run), attacked, keys, cost=cost * rounds / 25))
    return found


def epochs_a_round(scale: Scale) -> float:
    """How often a client's images go by in a round."""
    steps = int(SETTING["local-steps"])
    if scale.data_set("mnist") == "digits":
        return steps * int(DIGITS["batch-size"]) / int(DIGITS["examples-per-client"])
    return steps * int(scale.choose(SETTING, QUICK)["batch-size"]) / 1000


def _drawn(scale: Scale) -> list[tuple[int, int]]:
    """The seeds and draws of every run, in the order of the runs' numbers."""
    draws = range(scale.num_draws(5, 1))
    return [(seed, draw) for seed in range(scale.num_seeds(1, 1)) for draw in draws]


def attacked(settings: Mapping[str, Any], context: Context) -> Value:
    """Test "accuracy" in %, training "loss" (of 6000 training images) and "seconds" since the start
    after every round, and at the start; and of the corrupt and of the honest clients the share in %
    whose update the rule left out, in every round.

    A "draw" d > 0 takes the initial weights of seed 1000 + d, and all else from the run's own.
    """
    values = {key: value for key, value in settings.items() if key != "draw"}
    config = make_config({**values, "data-dir": context.data_dir})
    draw = settings.get("draw", 0)
    drawn = {"seed": 1000 + draw} if draw else {}
    problem = load_problem(make_config({**values, "data-dir": context.data_dir, **drawn}))
    problem = replace(problem, config=config)
    corrupt_in = redrawn_corrupt(config.num_clients, config.num_byzantine, config.seed)
    curves: dict[str, list[float]] = {"accuracy": [], "loss": [], "seconds": []}
    removed: dict[str, list[float]] = {"corrupt removed": [], "honest removed": []}
    attackers = config.num_byzantine
    seen = _training_images(problem)
    begun = time.perf_counter()

    def watch(report: RoundReport) -> None:
        curves["accuracy"].append(round(100 * report.metrics["accuracy"], 3))
        loss = evaluate(problem.model, report.model, seen)["loss"]
        curves["loss"].append(float(f"{loss:.5g}"))
        curves["seconds"].append(round(time.perf_counter() - begun, 2))
        if not report.server_round:
            return  # before the first round nobody is there to be left out
        corrupt = len(corrupt_in(report.server_round) & set(report.filtered))
        honest = len(report.filtered) - corrupt
        removed["corrupt removed"].append(100 * corrupt / max(1, attackers))
        removed["honest removed"].append(100 * honest / (config.num_clients - attackers))

    run_alone(EngineRun(config, problem, [watch]))
    return {**curves, **removed}


def _training_images(problem: Problem) -> Examples:
    """6000 of them, or all, evenly over the set."""
    task = problem.task
    assert isinstance(task, LabelledTask) and task.train is not None
    count = len(task.train)
    return task.train.select(np.linspace(0, count - 1, min(count, 6000)).astype(np.int64))
