"""The synthetic quadratic of Das et al., section 5.3 (Figures 1 to 3)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from blackthorn.experiments.engine_run import EngineRun, run_alone
from blackthorn.experiments.estimate import Estimate
from blackthorn.experiments.finding import Claim, ahead, between
from blackthorn.experiments.study import (
    Cell,
    Context,
    Numbers,
    Plot,
    Scale,
    Section,
    Table,
    Value,
    series,
    spread,
)
from blackthorn.reporting.figures import BLUE, CYCLE, ORANGE, legend_above, new_figure
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.strategies.algorithms import algorithm_class
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.least_squares import LeastSquares
from blackthorn.tasks.problem import Problem

PRIVATE = {"clipping": "dp-fedavg", "normalising": "dp-normfedavg"}
BOUNDS = (100.0, 50.0, 40.0)
# The start: w* + z, z uniform on (0, 1) in each coordinate, or a fifth of that way.
STARTS = {"I1": 1.0, "I2": 0.2}
RATE = 0.001
# Figure 1 shows several rates without naming them.
RATES = (0.0005, 0.001, 0.002)
# 100 clients, 200 dimensions, E = 20 local steps.
SETTING: dict[str, Any] = {
    "task": "least-squares",
    "num-clients": 100,
    "num-server-rounds": 500,
    "local-steps": 20,
    "batch-size": 0,
    "delta": 1e-6,
    "noise-multiplier": 23.24,
    # Both methods get the same noise, which leaves no privacy to claim.
    "insecure-seeded-noise": True,
    "dtype": "float64",
}
RATIOS = {100.0: (1.6, 1.95), 50.0: (1.02, 1.12), 40.0: (0.97, 1.03)}
_DIMENSION, _ROWS = 200, 20
_EVERY = 5  # rounds between the points of a curve


def problem_of(seed: int) -> tuple[LeastSquares, torch.Tensor, torch.Tensor]:
    """The task of section 5.3, z and the minimum w*, both float64 [200].

    f_i(w) = ½ (w − w_i*)ᵀ A_i A_iᵀ (w − w_i*), A_i [200, 20] with entries N(0, 1/20²): the mean
    over 20 equations of ½ (⟨√20 a, w⟩ − √20 ⟨a, w_i*⟩)², a the columns of A_i.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, 0x53])))
    clients = int(SETTING["num-clients"])
    centres = generator.normal(size=(clients, _DIMENSION))
    columns = generator.normal(size=(clients, _ROWS, _DIMENSION)) / _ROWS
    offset = generator.uniform(size=_DIMENSION)
    targets = np.einsum("cnd,cd->cn", columns, centres)
    hessian = np.einsum("cnd,cne->de", columns, columns)
    minimum = np.linalg.solve(hessian, np.einsum("cn,cnd->d", targets, columns))
    scale = np.sqrt(_ROWS)
    task = LeastSquares(
        tuple(torch.from_numpy(scale * columns)), tuple(torch.from_numpy(scale * targets)), 0.0
    )
    return task, torch.from_numpy(offset), torch.from_numpy(minimum)


def cells(scale: Scale) -> list[Cell]:
    """A cell for every method, threshold, start, rate and seed: each seed another problem."""
    starts = scale.choose(tuple(STARTS), ("I1",))
    rates = scale.choose(RATES, (RATE,))
    return [
        Cell(
            (method, bound, start, rate, seed),
            trajectory,
            {
                **SETTING,
                "algorithm": PRIVATE[method],
                "clip-norm": bound,
                "start": start,
                "local-lr": rate,
                "seed": seed,
            },
            cost=12,
        )
        for bound in BOUNDS
        for start in starts
        for rate in rates
        for method in PRIVATE
        # All seeds at the rate whose outcome is known, one at the others.
        for seed in range(scale.num_seeds(3, 1) if rate == RATE else 1)
    ]


def trajectory(settings: Mapping[str, Any], context: Context) -> Value:
    """f(w_k) − f(w*), the signal-to-noise ratio and w_k − w* in a plane, every fifth round.

    The plane is spanned by w_0 − w* ("along") and by what the first gradient adds to it
    ("across"): both methods of a seed see the same plane.
    """
    del context
    values = dict(settings)
    start = STARTS[values.pop("start")]
    config = make_config(values)
    task, offset, minimum = problem_of(config.seed)
    module = task.module("auto", 0)
    with torch.no_grad():
        module.x.copy_(minimum + start * offset)  # type: ignore[operator]
    problem = Problem(config, task, FlatModel(module, task.example_loss))
    watch = _Watch(config, problem, minimum)
    run_alone(EngineRun(config, problem, [watch]), evaluates=False)
    return watch.value()


class _Watch:
    """Observer of one run."""

    def __init__(self, config: RunConfig, problem: Problem, minimum: torch.Tensor) -> None:
        self._config = config
        self._problem = problem
        self._minimum = minimum
        self._floor = problem.task.evaluate(problem.model, minimum)["loss"]
        module = problem.model.module
        self._last = problem.model.flatten(dict(module.state_dict())).double()
        self._plane = _plane(problem, self._last, minimum)
        self._curves: dict[str, list[float]] = {
            "round": [], "suboptimality": [], "ratio": [], "along": [], "across": []
        }  # fmt: skip

    def __call__(self, report: RoundReport) -> None:
        # The first row is the start, which has no signal-to-noise ratio.
        ratio = math.nan
        if report.server_round:
            ratio = self._ratio(report)
        if report.server_round % _EVERY == 0:
            loss = self._problem.task.evaluate(self._problem.model, report.model)["loss"]
            along, across = (self._plane @ (report.model.double() - self._minimum)).tolist()
            numbers = (report.server_round, loss - self._floor, ratio, along, across)
            for own, number in zip(self._curves.values(), numbers, strict=True):
                own.append(float(f"{number:.6g}"))
        self._last = report.model.double()

    def _ratio(self, report: RoundReport) -> float:
        """‖(1/r) Σ g_i‖ over the norm of the noise that the step had beside it."""
        assert report.updates is not None, "all clients answer"
        kind = algorithm_class(self._config)
        assert issubclass(kind, PrivateAveraging)
        bounded = kind.bounded.constrain(report.updates.double(), self._config.clip_norm)
        signal = bounded.sum(dim=0) / self._config.num_clients
        step = (self._last - report.model.double()) / report.local_lr
        return float(signal.norm() / (step - signal).norm())

    def value(self) -> Value:
        """The curves; the ratio of the start is None."""
        ratios = [None if math.isnan(ratio) else ratio for ratio in self._curves["ratio"]]
        return {**self._curves, "ratio": ratios}


def _plane(problem: Problem, start: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Two orthonormal directions, float64 [2, d]."""
    along = (start - minimum) / (start - minimum).norm()
    task = problem.task
    assert isinstance(task, LeastSquares)
    rows, targets = torch.cat(list(task.a)).double(), torch.cat(list(task.b)).double()
    residual = rows @ start - targets
    gradient = rows.T @ residual
    across = gradient - (gradient @ along) * along
    return torch.stack([along, across / across.norm()])


def section(numbers: Numbers, scale: Scale) -> Section:
    """Figures 1, 2 and 3."""
    cases = sorted({label[:-1] for label in numbers}, key=lambda c: (-float(c[1]), c[2], c[3]))
    rows = []
    for _, bound, start, rate in [case for case in cases if case[0] == "clipping"]:
        ends = {m: ends_of(numbers, m, bound, start, rate) for m in PRIVATE}
        ratio = [a / b for a, b in zip(ends["clipping"], ends["normalising"], strict=True)]
        rows.append(
            [
                *(f"{bound:g}", str(start), f"{rate:g}"),
                *(spread(ends[method], 3) for method in PRIVATE),
                spread(ratio, 2),
            ]
        )
    heads = ["C", "start", "η", "clipping", "normalising", "clipping / normalising"]
    table = Table(
        "f(w_K) − f(w*) after 500 rounds, mean ± standard error (range) over the seeds", heads, rows
    )
    expected = Table("Expected ratios from I1 at η = 0.001", ["C", "ratio"], _expected_rows())
    starts = list(dict.fromkeys(str(case[2]) for case in cases))
    plots = [
        *(_suboptimality_plot(numbers, start) for start in starts),
        _ratio_plot(numbers),
        _path_plot(numbers),
    ]
    texts = [
        "Both methods get the same noise. The paper does not name the rates of its Figure 1; "
        "these are a half, one and two times the one whose outcome is known beforehand, which "
        "alone has more than one seed."
    ]
    if scale.quick:
        texts.append("Quick: one seed, the start I1, and η = 0.001 alone.")
    setting = {**SETTING, "clip-norm C": BOUNDS, "local-lr η": scale.choose(RATES, (RATE,))}
    return Section(claims(numbers, scale), [table, expected], plots, texts, setting)


def _expected_rows() -> list[list[str]]:
    return [["100", "1.78"], ["50", "1.06"], ["40", "1.00 ± 0.03"]]


def ends_of(numbers: Numbers, *label: str | float) -> list[float]:
    """f(w_K) − f(w*) by seed."""
    return [value["suboptimality"][-1] for value in series(numbers, *label)]


def claims(numbers: Numbers, scale: Scale) -> list[Claim]:
    """Figure 1's and Figure 2's sentences."""
    ratios = {bound: _ratios(numbers, bound, "I1", RATE) for bound in BOUNDS}
    what = "clipping's suboptimality over normalising's"
    wide = {100.0: (1.5, 2.1), 50.0: (1.01, 1.14), 40.0: (0.95, 1.05)}
    ranges = scale.choose(RATIOS, wide)
    return [
        Claim(
            "At C = 100 and 50 normalising ends nearer the minimum than clipping.",
            [
                between(f"C = {c:g}: {what}", Estimate.of(ratios[c]), *ranges[c])
                for c in (100.0, 50.0)
            ],
        ),
        Claim(
            "At C = 40 the two are nearly equal.",
            [between(f"C = 40: {what}", Estimate.of(ratios[40.0]), *ranges[40.0])],
        ),
        ratio_claim(
            {
                (method, bound): mean_ratios(numbers, method, bound)
                for method in PRIVATE
                for bound in BOUNDS
            }
        ),
        _every_rate(numbers),
    ]


def _ratios(numbers: Numbers, bound: float, start: str, rate: float) -> np.ndarray:
    """Clipping's suboptimality over normalising's, by seed."""
    ends = [ends_of(numbers, method, bound, start, rate) for method in PRIVATE]
    return np.divide(ends[0], ends[1])


def _every_rate(numbers: Numbers) -> Claim:
    """Normalising is ahead at C = 100 for every start and rate that was measured."""
    cases = [label[1:-1] for label in numbers if label[0] == "clipping" and label[1] == 100.0]
    findings = []
    for bound, start, rate in dict.fromkeys(cases):
        ratios = Estimate.of(_ratios(numbers, float(bound), str(start), float(rate)))
        what = f"C = 100, {start}, η = {rate}: clipping's over normalising's"
        findings.append(between(what, ratios, 1.0, math.inf))
    return Claim("At C = 100 that holds for every start and every rate.", findings)


def mean_ratios(numbers: Numbers, method: str, bound: float) -> np.ndarray:
    """The signal-to-noise ratio, mean over rounds, from I1 at η = 0.001, by seed."""
    own = series(numbers, method, bound, "I1", RATE)
    return np.array([np.mean([r for r in value["ratio"] if r is not None]) for value in own])


def ratio_claim(ratios: Mapping[tuple[str, float], np.ndarray]) -> Claim:
    """Figure 2's sentence, from ratios by (method, C), one a seed."""
    findings = []
    for bound in BOUNDS:
        clipping, normalising = (ratios[method, bound] for method in PRIVATE)
        findings.append(
            ahead(
                f"C = {bound:g}, mean over the rounds of normalising's and of clipping's",
                *(normalising, clipping, "normalising not below clipping"),
                # The paths differ, so that equal ratios differ by a rounding of their third digit.
                room=0.01 * float(clipping.mean()),
                digits=3,
            )
        )
    gains = {bound: ratios["normalising", bound] / ratios["clipping", bound] for bound in BOUNDS}
    findings += [
        ahead(
            f"gain of the ratio at C = {bound:g} and at 40",
            *(gains[bound], gains[40.0], f"more at {bound:g}"),
            digits=2,
        )
        for bound in (100.0, 50.0)
    ]
    return Claim(
        "The signal-to-noise ratio of normalising is never below that of clipping, and gains most "
        "at C = 100 and 50.",
        findings,
    )


def _mean_curve(numbers: Numbers, name: str, *label: str | float) -> tuple[Any, np.ndarray]:
    own = series(numbers, *label)
    rounds = own[0]["round"]
    curves = np.array([[math.nan if v is None else v for v in value[name]] for value in own])
    return rounds, curves.mean(axis=0)


def _suboptimality_plot(numbers: Numbers, start: str) -> Plot:
    rates = sorted({float(label[3]) for label in numbers if label[2] == start})
    figure = new_figure(6.4)
    panels = figure.subplots(len(BOUNDS), 1, sharex=True)
    for axes, bound in zip(panels, BOUNDS, strict=True):
        for i, rate in enumerate(rates):
            for method, style in (("clipping", "--"), ("normalising", "-")):
                rounds, curve = _mean_curve(numbers, "suboptimality", method, bound, start, rate)
                label = f"{'Clip' if method == 'clipping' else 'Norm'}({rate:g})"
                axes.plot(rounds, curve, style, color=CYCLE[i], label=label)
        axes.set(yscale="log", ylabel=f"f(w_k) − f(w*)\n(no unit), C = {bound:g}")
        axes.grid(alpha=0.3)
    legend_above(panels[0])
    panels[-1].set_xlabel("communication round k")
    return Plot(f"figure-1-{start}", f"Figure 1: suboptimality from {start}.", figure)


def _ratio_plot(numbers: Numbers) -> Plot:
    figure = new_figure(6.4)
    panels = figure.subplots(len(BOUNDS), 1, sharex=True)
    for axes, bound in zip(panels, BOUNDS, strict=True):
        for method, style, color in (("clipping", "--", ORANGE), ("normalising", "-", BLUE)):
            rounds, curve = _mean_curve(numbers, "ratio", method, bound, "I1", RATE)
            axes.plot(rounds, curve, style, color=color, label=method)
        axes.set(ylabel=f"signal / noise\n(no unit), C = {bound:g}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    legend_above(panels[0])
    panels[-1].set_xlabel("communication round k")
    caption = f"Figure 2: signal-to-noise ratio from I1 at η = {RATE:g}, mean over the seeds."
    return Plot("figure-2", caption, figure)


def _path_plot(numbers: Numbers) -> Plot:
    figure = new_figure(5.6)
    panels = figure.subplots(2, 1)
    for axes, bound in zip(panels, (100.0, 50.0), strict=True):
        for method, style, color in (("clipping", "--", ORANGE), ("normalising", "-", BLUE)):
            own = series(numbers, method, bound, "I1", RATE)[0]
            path = [_smooth(own["along"]), _smooth(own["across"])]
            axes.plot(*path, style, color=color, label=method)
            axes.plot(path[0][-1], path[1][-1], "o", color=color, ms=5)
        axes.plot(0, 0, "*", color="black", ms=10, label="minimum w*")
        axes.set(ylabel=f"across (no unit), C = {bound:g}")
        axes.grid(alpha=0.3)
    legend_above(panels[0])
    panels[1].set_xlabel("along w_0 − w* (no unit)")
    caption = (
        "Figure 3: smoothed paths from I1 in the plane of w_0 − w* and the first gradient; a dot "
        "marks the end."
    )
    return Plot("figure-3", caption, figure)


def _smooth(values: Sequence[float], window: int = 5) -> np.ndarray:
    """Running mean, shorter at the ends."""
    array = np.array(values)
    return np.array(
        [array[max(0, i - window // 2) : i + window // 2 + 1].mean() for i in range(len(array))]
    )
