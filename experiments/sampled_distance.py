"""Sampled FA-LD chains beside a posterior in closed form (Deng et al., Algorithms 1 and 3)."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blackthorn.experiments.estimate import Estimate
from blackthorn.experiments.exact_distance import distance
from blackthorn.experiments.finding import Claim, ahead, between
from blackthorn.experiments.gaussian_chain import chain, energies, full, scheme_1, stationary
from blackthorn.experiments.study import (
    Cell,
    Context,
    Numbers,
    Scale,
    Section,
    Table,
    Value,
    series,
    spread,
)
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.tasks.bayes_linear import BayesLinear
from blackthorn.tasks.problem import load_problem

# recipes/fa-ld-bayes-linear.toml (a test compares them).
KNOWN_POSTERIOR: dict[str, str | int | float | bool] = {
    "algorithm": "fa-ld",
    "task": "bayes-linear",
    "dtype": "float64",
    "problem-dimension": 3,
    "num-clients": 5,
    "examples-per-client": 20,
    "heterogeneity": 1.0,
    "imbalance": 0.6,
    "prior-precision": 1.0,
    "num-server-rounds": 600,
    "local-steps": 10,
    "batch-size": 0,
    "local-lr": 0.001,
    "shared-noise": 0.5,
    "burn-in": 50,
    "max-samples": 550,
    "evaluate-every": 100,
    "instruments": False,
}
VARIATIONS: dict[str, dict[str, str | int | float]] = {
    "as in the recipe": {},
    "a fifth of the step size": {"local-lr": 0.0002},
    "one local step, not ten": {"local-steps": 1},
    "scheme I, four draws": {"participation": "with-replacement", "clients-per-round": 4},
    "scheme I, two draws": {"participation": "with-replacement", "clients-per-round": 2},
}


def cells(scale: Scale) -> list[Cell]:
    """A chain for every variation of the recipe and every seed of the noise."""
    rounds = scale.choose(4000, 600)
    lengths = {"num-server-rounds": rounds, "max-samples": rounds - 50, "evaluate-every": rounds}
    return [
        Cell(
            (name, seed),
            sampled,
            {**KNOWN_POSTERIOR, **variation, **lengths, "langevin-seed": seed},
            cost=0.02 * rounds,
        )
        for name, variation in VARIATIONS.items()
        for seed in range(scale.num_seeds(3, 1))
    ]


def sampled(settings: Mapping[str, Any], context: Context) -> Value:
    """W2 to the exact posterior: "sampled", of the Gaussian fitted to a chain's samples, and
    "exact", of the chain's own stationary law."""
    del context
    with tempfile.TemporaryDirectory() as folder:
        config = make_config({**settings, "report": False, "output-dir": str(Path(folder) / "run")})
        prepared = prepare(config)
        summary = execute(prepared, EngineGrid(config, prepared.problem), [])
    return {"sampled": float(summary["posterior"]["w2"]), "exact": exact(config)}


def exact(config: RunConfig) -> float:
    """W2 of the chain's stationary moments to the posterior."""
    task = load_problem(config).task
    assert isinstance(task, BayesLinear)
    rows, targets = ([own.numpy() for own in part] for part in (task.x, task.y))
    of = energies(rows, targets, config.prior_precision)
    taking_part = full(of.p)
    if config.participation == "with-replacement":
        taking_part = scheme_1(of.p, config.clients_per_round)
    steps = [config.local_lr] * config.local_steps
    return distance(stationary(chain(of, steps, config.shared_noise, taking_part)), of.posterior)


def section(numbers: Numbers, scale: Scale) -> Section:
    """Sampled beside exact."""
    found = {
        name: {kind: [own[kind] for own in series(numbers, name)] for kind in ("sampled", "exact")}
        for name in VARIATIONS
    }
    rows = [
        [name, spread(own["sampled"], 3), f"{own['exact'][0]:.3f}"] for name, own in found.items()
    ]
    table = Table("W2 to the posterior (unit of θ)", ["chain", "sampled", "exact"], rows)
    rounds = scale.choose(4000, 600)
    text = (
        f"Chains of {rounds} rounds, the first 50 left out, one a seed of the noise. A sample's W2 "
        "is never below what its finite length leaves, so that a small exact distance shows as a "
        "larger one."
    )
    setting = {**KNOWN_POSTERIOR, "num-server-rounds": rounds, "max-samples": rounds - 50}
    return Section(claims(found, scale), [table], texts=[text], setting=setting)


def claims(found: Mapping[str, Mapping[str, Sequence[float]]], scale: Scale) -> list[Claim]:
    """The order of the sampled distances, and that they are those of the exact law; one a seed."""
    recipe, small, one, four, two = (found[name]["sampled"] for name in VARIATIONS)
    order = [
        ahead(f"W2, {what}", farther, nearer, "the first above", digits=3)
        for what, farther, nearer in (
            ("as in the recipe, and with a fifth of the step size", recipe, small),
            ("as in the recipe, and with one local step", recipe, one),
            ("with scheme I, four draws, and as in the recipe", four, recipe),
            ("with scheme I, two draws, and with four", two, four),
        )
    ]
    # Where the bias is large the sampling error is small beside it.
    room = scale.choose(0.15, 0.35)
    near = [
        between(
            f"{name}: sampled over exact",
            Estimate.of(np.divide(own["sampled"], own["exact"])),
            *(1 - room, 1 + room),
        )
        for name, own in found.items()
        if "draws" in name
    ]
    bound = scale.choose(0.05, 0.12)
    near += [
        between(
            f"{name}: sampled − exact",
            Estimate.of_difference(own["sampled"], own["exact"]),
            *(-bound, bound),
        )
        for name, own in found.items()
        if "draws" not in name
    ]
    return [
        Claim(
            "Sampled chains come nearer the posterior with smaller η and K, and less near with "
            "fewer clients.",
            order,
        ),
        Claim("Sampled chains have the exact law of the recursion.", near, ours=True),
    ]
