"""FAT-Clipping's synthetic problem, f(x, ξ) = ½‖x‖² + ⟨ξ, x⟩ (Yang et al., Figures 4 and 5)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from blackthorn.experiments.engine_run import EngineRun, run_in_lockstep
from blackthorn.experiments.estimate import median_below, median_interval
from blackthorn.experiments.finding import Claim, Finding, between
from blackthorn.experiments.study import (
    Cell,
    Context,
    Label,
    Numbers,
    Plot,
    Scale,
    Section,
    Table,
    Value,
    blocks,
)
from blackthorn.reporting.figures import CYCLE, legend_above, new_figure
from blackthorn.settings.config import make_config
from blackthorn.strategies.options import Observer
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import Problem, load_problem

# x_1 = (1, ..., 1) in ten dimensions, five clients.
SETTING: dict[str, str | int | float] = {
    "task": "quadratic-noise",
    "problem-dimension": 10,
    "noise-law": "cauchy",
    "num-clients": 5,
    "num-server-rounds": 200,
    "local-steps": 10,
    "batch-size": 1,
    "local-lr": 0.01,
    "instruments": False,
}
METHODS: dict[str, dict[str, str | float]] = {
    "FedAvg": {"algorithm": "gfedavg"},
    "PR 3": {"algorithm": "fat-clipping-pr", "clip-norm": 3.0},
    "PR 30": {"algorithm": "fat-clipping-pr", "clip-norm": 30.0},
    "PI 3": {"algorithm": "fat-clipping-pi", "clip-norm": 3.0},
    "BiClip 0.1 to 1": {"algorithm": "biclip", "algorithm-options": "low = 0.1, high = 1.0"},
    "FedAvg, Gaussian": {"algorithm": "gfedavg", "noise-law": "gaussian"},
}
# Figure 5's methods and tail indices; λ is what each method does well with at α = 1.
ALPHAS = (0.5, 1.0, 1.5)
ALPHA_METHODS = ("PR 30", "PI 3")
LAST_ROUNDS = 20
_LEVEL = 1.0  # a tenth of ‖x_1‖²
# So many seeds are run in lockstep: more would not make a run any faster.
_SEEDS_TOGETHER = 25


def cauchy_cells(scale: Scale) -> list[Cell]:
    """A cell for every method and block of seeds; a tenth of the seeds for Gaussian noise."""
    num_seeds = scale.num_seeds(100, 20)
    cells = []
    for method, values in METHODS.items():
        own = max(1, num_seeds // 10) if "Gaussian" in method else num_seeds
        cells += _cells((method,), values, own)
    return cells


def alpha_cells(scale: Scale) -> list[Cell]:
    """A cell for every method of Figure 5, tail index and block of seeds."""
    cells = []
    for method in ALPHA_METHODS:
        for alpha in ALPHAS:
            values = {**METHODS[method], "noise-law": "stable", "noise-alpha": alpha}
            cells += _cells((method, alpha), values, scale.num_seeds(50, 12))
    return cells


def _cells(label: Label, values: Mapping[str, Any], num_seeds: int) -> list[Cell]:
    return [
        Cell(
            (*label, start),
            trajectories,
            {**SETTING, **values, "first-seed": start, "past-seed": stop},
            cost=0.5 + 0.25 * (stop - start),
        )
        for start, stop in blocks(num_seeds, _SEEDS_TOGETHER)
    ]


def trajectories(settings: Mapping[str, Any], context: Context) -> Value:
    """‖x‖² of a run a seed: "norms" [seeds, T + 1], from the start on, in four digits."""
    del context
    values = dict(settings)
    seeds = range(values.pop("first-seed"), values.pop("past-seed"))
    norms: list[list[float]] = [[] for _ in seeds]
    runs = []
    for seed, own in zip(seeds, norms, strict=True):
        config = make_config({**values, "seed": seed})
        problem = load_problem(config)
        own.append(config.problem_dimension * config.initial_point**2)
        runs.append(EngineRun(config, problem, [_watch(problem, own)]))
    # The gradient is analytic: nothing has to be recorded for automatic differentiation.
    with torch.inference_mode():
        run_in_lockstep(runs)
    return {"norms": [[float(f"{norm:.4g}") for norm in own] for own in norms]}


def _watch(problem: Problem, norms: list[float]) -> Observer:
    def watch(report: RoundReport) -> None:
        norms.append(problem.task.evaluate(problem.model, report.model)["squared-norm"])

    return watch


def _norms(numbers: Numbers, *label: str | float) -> np.ndarray:
    """‖x‖² by seed and round, float64 [seeds, T + 1]."""
    blocks_found = sorted((key[-1], value) for key, value in numbers.items() if key[:-1] == label)
    return np.concatenate([np.array(value["norms"]) for _, value in blocks_found])


def tails(norms: np.ndarray) -> np.ndarray:
    """The mean of ‖x‖² over the last 20 rounds, float64 [seeds]; infinite where it overflowed."""
    with np.errstate(over="ignore"):
        return np.asarray(norms[:, -LAST_ROUNDS:].mean(axis=1))


def cauchy_section(numbers: Numbers, scale: Scale) -> Section:
    """Figure 4."""
    norms = {method: _norms(numbers, method) for method in METHODS}
    figures = {method: tails(values) for method, values in norms.items()}
    rows = [
        [
            *(method, str(len(tail)), f"{tail.min():.3g}", _median_said(tail)),
            f"{tail.max():.3g}",
        ]
        for method, tail in figures.items()
    ]
    table = Table(
        "Mean of ‖x‖² over the last 20 of 200 rounds",
        ["method and λ (gradient units)", "seeds", "smallest", "median (95 %)", "largest"],
        rows,
    )
    curves = {method: np.median(values, axis=0) for method, values in norms.items()}
    plot = _plot("figure-4", curves, "Figure 4: median of ‖x‖² over the seeds, Cauchy noise.")
    return Section(cauchy_claims(figures, scale), [table], [plot], setting=SETTING)


def cauchy_claims(figures: Mapping[str, np.ndarray], scale: Scale) -> list[Claim]:
    """What the paper says of Figure 4, held against `figures`, one ‖x‖² a seed by method."""
    fedavg, pr3, pr30 = figures["FedAvg"], figures["PR 3"], figures["PR 30"]
    pi3, gaussian = figures["PI 3"], figures["FedAvg, Gaussian"]
    biclip = figures["BiClip 0.1 to 1"]
    # Few seeds leave a median and a share more room; every seed's own bounds are the same.
    median, share = scale.choose((0.02, 0.045), (0.015, 0.06)), scale.choose(0.9, 0.8)
    # In closed form E‖x‖² = 0.01005 where Gaussian noise keeps it: v = η² (1 − (1 − η)^2K) /
    # (1 − (1 − η)²) a client and coordinate, d v / (5 (1 − (1 − η)^2K)) with d = 10, η = 0.01. A
    # seed's mean over 20 rounds deviates by 0.003 from it, the median of the few seeds by less.
    stationary = scale.choose((0.006, 0.015), (0.003, 0.02))
    above = Finding(
        "PR 30 above PI 3, share of seeds",
        f"{np.mean(pr30 > pi3):.0%}",
        "every seed",
        bool((pr30 > pi3).all()),
    )
    return [
        Claim(
            "FAT-Clipping-PI converges under Cauchy noise.",
            [
                between("‖x‖² with λ = 3, largest of the seeds", pi3.max(), -np.inf, 0.2),
                between("median", float(np.median(pi3)), *median),
            ],
        ),
        Claim(
            "FAT-Clipping-PR converges under Cauchy noise.",
            [
                between("‖x‖² with λ = 30, smallest of the seeds", pr30.min(), 0.05, 1.0),
                between("largest", pr30.max(), 0.05, 1.0),
                between("with λ = 3, smallest", pr3.min(), 2.0, np.inf),
            ],
            note="To a level that λ decides: λ = 3, which suits PI, leaves PR far from the "
            "minimum after 200 rounds.",
        ),
        Claim("FAT-Clipping-PI converges faster than FAT-Clipping-PR.", [above]),
        Claim(
            "FedAvg does not converge under Cauchy noise.",
            [
                between("‖x‖², smallest of the seeds", fedavg.min(), 5.0, np.inf),
                between("share of seeds above 10", float(np.mean(fedavg > 10)), share, 1.0),
            ],
        ),
        Claim(
            "BiClip, which bounds every coordinate of a step, ends lower than either.",
            [
                between("‖x‖², median", float(np.median(biclip)), 0.005, 0.02),
                Finding(
                    "below PI 3, share of seeds",
                    f"{np.mean(biclip < pi3):.0%}",
                    "at least 80%",
                    bool(np.mean(biclip < pi3) >= 0.8),
                ),
            ],
            ours=True,
            note="Coordinates of a step between 0.1 and 1, gradient units (arXiv 2502.04164).",
        ),
        Claim(
            "It is the fat tail that FedAvg fails at: it converges under Gaussian noise.",
            [between("‖x‖², median", float(np.median(gaussian)), *stationary)],
            ours=True,
        ),
    ]


def alpha_section(numbers: Numbers, scale: Scale) -> Section:
    """Figure 5."""
    norms = {(m, a): _norms(numbers, m, a) for m in ALPHA_METHODS for a in ALPHAS}
    curves = {f"{m}, α = {a:g}": np.median(values, axis=0) for (m, a), values in norms.items()}
    rows = [
        [
            *(f"{method}", f"{alpha:g}", str(len(values))),
            _median_said(tails(values)),
            _rounds_said(values),
        ]
        for (method, alpha), values in norms.items()
    ]
    table = Table(
        f"By tail index: ‖x‖² and the rounds until its median over the seeds is below {_LEVEL:g}",
        [
            "method and λ",
            "α",
            "seeds",
            "median of ‖x‖² (95 %), last 20 rounds",
            f"rounds to {_LEVEL:g}",
        ],
        rows,
    )
    plot = _plot("figure-5", curves, "Figure 5: median of ‖x‖² over the seeds, by tail index α.")
    figures = {key: tails(values) for key, values in norms.items()}
    setting = {**SETTING, "noise-law": "stable"}
    del scale
    return Section(alpha_claims(figures), [table], [plot], setting=setting)


def _median_said(values: np.ndarray) -> str:
    low, high = median_interval(values)
    return f"{np.median(values):.3g} ({low:.3g} to {high:.3g})"


def _rounds_said(norms: np.ndarray) -> str:
    below = np.flatnonzero(np.median(norms, axis=0) < _LEVEL)
    return str(below[0]) if below.size else "never"


def alpha_claims(figures: Mapping[tuple[str, float], np.ndarray]) -> list[Claim]:
    """Figure 5's caption, and what it comes to, from ‖x‖² by (method, α), one a seed."""
    slower, faster = [], []
    for method in ALPHA_METHODS:
        for fat, light in itertools.pairwise(ALPHAS):
            at = [figures[method, alpha] for alpha in (fat, light)]
            what = f"{method}, median of ‖x‖² (95 %) at α = {fat:g} and at {light:g}"
            said = " and ".join(_median_said(own) for own in at)
            slower.append(Finding(what, said, "rising with α", median_below(*at)))
            faster.append(Finding(what, said, "falling with α", median_below(*reversed(at))))
    return [
        Claim(
            "Both methods converge more slowly as α increases (section 5 and Figure 5).",
            slower,
            foreseen="not",
            note="It is the other way round: see the next line.",
        ),
        Claim("Larger α, a lighter tail, converges faster.", faster, ours=True),
    ]


def _plot(name: str, curves: Mapping[str, Sequence[float]], caption: str) -> Plot:
    figure = new_figure()
    axes = figure.add_subplot()
    styles = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
    for i, (label, values) in enumerate(curves.items()):
        axes.plot(values, linestyle=styles[i % 6], color=CYCLE[i % len(CYCLE)], label=label)
    axes.set(xlabel="communication round", ylabel="‖x‖² (no unit; minimum at 0)", yscale="log")
    axes.grid(alpha=0.3)
    legend_above(axes)
    return Plot(name, caption, figure)
