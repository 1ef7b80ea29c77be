"""DP-NormFedAvg (Das et al.): what normalising is worth over clipping, at the same privacy."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from experiments.engine_run import EngineRun, run_alone
from experiments.finding import Finding, between
from server_app.config import make_config
from strategies.reports import RoundReport
from tasks.flat_model import FlatModel
from tasks.least_squares import LeastSquares
from tasks.problem import Problem, load_problem

Advance = Callable[[int, int], None]
PRIVATE = {"clipping": "dp-fedavg", "normalising": "dp-normfedavg"}

# Fashion-MNIST (section 6 and Appendix G): 3000 clients of 20 examples, logistic regression.
FASHION: dict[str, Any] = {
    "task": "fashion-mnist",
    "model": "logistic",
    "partition": "label-shards",
    "shards-per-client": 5,
    "num-clients": 3000,
    "participation": "poisson",
    "sample-rate": 0.2,
    "num-server-rounds": 100,
    "local-steps": 20,
    "batch-size": 0,
    "local-lr": 0.032,
    "local-lr-decay": 0.99,
    "weight-decay": 1e-4,
    "server-momentum": 0.8,
}
BUDGET: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "accountant": "rdp"}
FASHION_BOUNDS = (62.5, 31.25, 15.6)
# Accuracy that normalising gains over clipping, in points, and how far a few seeds may be off.
_FASHION_GAINS = {62.5: (2.5, 0.9), 31.25: (1.1, 0.6), 15.6: (0.0, 0.5)}

# The quadratic of section 5.3, from I1: 100 clients, 200 dimensions, E = 20 local steps.
QUADRATIC_BOUNDS = (100.0, 50.0, 40.0)
QUADRATIC: dict[str, Any] = {
    "task": "least-squares",
    "num-clients": 100,
    "num-server-rounds": 500,
    "local-steps": 20,
    "batch-size": 0,
    "local-lr": 0.001,
    "delta": 1e-6,
    "noise-multiplier": 23.24,
    # Both methods get the same noise, which leaves no privacy to claim.
    "insecure-seeded-noise": True,
}
_DIMENSION, _ROWS = 200, 20
_QUADRATIC_RATIOS = {100.0: (1.6, 1.95), 50.0: (1.02, 1.12), 40.0: (0.97, 1.03)}


def _never(done: int, total: int) -> None:
    del done, total


@dataclass(frozen=True)
class _Job:
    method: str
    bound: float
    seed: int
    settings: tuple[tuple[str, Any], ...]


def fashion_mnist(
    data_dir: str = "",
    num_seeds: int = 3,
    *,
    bounds: tuple[float, ...] = FASHION_BOUNDS,
    processes: int = 2,
    advance: Advance = _never,
    **settings: Any,
) -> dict[tuple[str, float], np.ndarray]:
    """Test accuracy (%) after T rounds by (method, C): float64 [num_seeds]; ("fedavg", 0.0) is
    FedAvg without noise.

    ε = 5 at δ = 1e-5 by RDP; cohorts and noise are from the operating system's entropy, a seed
    deals the examples. `settings` replace those of FASHION.
    """
    chosen = {**FASHION, **settings, "data-dir": data_dir}
    cases = [("fedavg", 0.0), *((method, bound) for bound in bounds for method in PRIVATE)]
    jobs = [
        _Job(method, bound, seed, tuple(chosen.items()))
        for method, bound in cases
        for seed in range(num_seeds)
    ]
    return _spread(_fashion_accuracy, jobs, processes, advance)


def _fashion_accuracy(job: _Job) -> float:
    values: dict[str, Any] = {**dict(job.settings), "seed": job.seed}
    values["evaluate-every"] = values["num-server-rounds"]
    if job.method == "fedavg":
        values["algorithm"] = "gfedavg"
    else:
        values.update(BUDGET, algorithm=PRIVATE[job.method], **{"clip-norm": job.bound})
    config = make_config(values)
    problem = load_problem(config)
    with torch.no_grad():
        for parameter in problem.model.module.parameters():
            parameter.zero_()
    accuracies: list[float] = []

    def watch(report: RoundReport) -> None:
        accuracies.extend([report.metrics["accuracy"]] if report.metrics else [])

    run_alone(EngineRun(config, problem, [watch]))
    return 100 * accuracies[-1]


def fashion_findings(figures: Mapping[tuple[str, float], np.ndarray]) -> list[Finding]:
    """What `fashion_mnist` gave, held against what it should be: gaps and order, in points."""
    findings = [between("FedAvg without noise", _mean(figures["fedavg", 0.0]), 82.4, 84.4)]
    for bound in sorted({bound for _, bound in figures if bound}, reverse=True):
        clipping, normalising = (figures[method, bound] for method in PRIVATE)
        gain, off = _FASHION_GAINS[bound]
        what = (
            f"C = {bound:g}: {_mean(normalising):.1f} normalising, {_mean(clipping):.1f} clipping"
        )
        gap = _mean(normalising) - _mean(clipping)
        findings.append(between(f"{what}; gap", gap, gain - off, gain + off))
    return findings


def quadratic(
    num_seeds: int = 3,
    *,
    bounds: tuple[float, ...] = QUADRATIC_BOUNDS,
    processes: int = 2,
    advance: Advance = _never,
) -> dict[tuple[str, float], np.ndarray]:
    """f(w_K) − f(w*) by (method, C): float64 [num_seeds], each seed another problem from I1."""
    jobs = [
        _Job(method, bound, seed, ())
        for bound in bounds
        for method in PRIVATE
        for seed in range(num_seeds)
    ]
    return _spread(_quadratic_suboptimality, jobs, processes, advance)


def _quadratic_suboptimality(job: _Job) -> float:
    values = {**QUADRATIC, "algorithm": PRIVATE[job.method], "clip-norm": job.bound}
    values |= {"seed": job.seed, "dtype": "float64"}
    config = make_config(values)
    task, start, minimum = quadratic_problem(job.seed)
    module = task.module("auto", 0)
    with torch.no_grad():
        module.x.copy_(start)  # type: ignore[operator]
    problem = Problem(config, task, FlatModel(module, task.example_loss))
    models: list[torch.Tensor] = []
    watch = EngineRun(config, problem, [lambda report: models.append(report.model)])
    run_alone(watch, evaluates=False)
    model = problem.model
    return task.evaluate(model, models[-1])["loss"] - task.evaluate(model, minimum)["loss"]


def quadratic_problem(seed: int) -> tuple[LeastSquares, torch.Tensor, torch.Tensor]:
    """The task of section 5.3, its start I1 and its minimum w*, both float64 [200].

    f_i(w) = ½ (w − w_i*)ᵀ A_i A_iᵀ (w − w_i*), A_i [200, 20] with entries N(0, 1/20²): the mean
    over 20 equations of ½ (⟨√20 a, w⟩ − √20 ⟨a, w_i*⟩)², a the columns of A_i.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, 0x53])))
    clients = int(QUADRATIC["num-clients"])
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
    return task, torch.from_numpy(minimum + offset), torch.from_numpy(minimum)


def quadratic_findings(figures: Mapping[tuple[str, float], np.ndarray]) -> list[Finding]:
    """The suboptimality of clipping over that of normalising, held against what it should be."""
    findings = []
    for bound in sorted({bound for _, bound in figures}, reverse=True):
        ratio = float(np.mean(figures["clipping", bound] / figures["normalising", bound]))
        low, high = _QUADRATIC_RATIOS[bound]
        findings.append(between(f"C = {bound:g}: clipping over normalising", ratio, low, high))
    return findings


def _spread(
    work: Callable[[_Job], float], jobs: list[_Job], processes: int, advance: Advance
) -> dict[tuple[str, float], np.ndarray]:
    results: dict[tuple[str, float], dict[int, float]] = {}
    # Spawned, not forked: a fork of a process with threads may never wake.
    with ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                job = futures[future]
                results.setdefault((job.method, job.bound), {})[job.seed] = future.result()
                advance(done, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {case: np.array([by[seed] for seed in sorted(by)]) for case, by in results.items()}


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    logging.getLogger("blackthorn").setLevel(logging.ERROR)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values))
