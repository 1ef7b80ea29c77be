"""FAT-Clipping (Yang et al.): what clipping is worth where gradients have fat tails."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch

from experiments.engine_run import run_in_engine
from experiments.finding import Finding, between
from server_app.config import make_config
from strategies.reports import RoundReport
from tasks.problem import load_problem

# f(x, ξ) = ½‖x‖² + ⟨ξ, x⟩ with x_1 = (1, ..., 1) in ten dimensions, five clients.
SETTING: dict[str, str | int | float] = {
    "task": "quadratic-noise",
    "problem-dimension": 10,
    "noise-law": "cauchy",
    "num-clients": 5,
    "num-server-rounds": 200,
    "local-steps": 10,
    "batch-size": 1,
    "local-lr": 0.01,
}
METHODS: dict[str, dict[str, str | float]] = {
    "FedAvg": {"algorithm": "gfedavg"},
    "PR 3": {"algorithm": "fat-clipping-pr", "clip-norm": 3.0},
    "PR 30": {"algorithm": "fat-clipping-pr", "clip-norm": 30.0},
    "PI 3": {"algorithm": "fat-clipping-pi", "clip-norm": 3.0},
    "FedAvg, Gaussian": {"algorithm": "gfedavg", "noise-law": "gaussian"},
}
LAST_ROUNDS = 20


@dataclass(frozen=True)
class _Job:
    method: str
    seed: int
    num_rounds: int


def cauchy(
    num_seeds: int = 100,
    *,
    num_rounds: int = 200,
    processes: int = 2,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, np.ndarray]:
    """The mean of ‖x‖² over the last 20 rounds by method: float64 [num_seeds], one a seed (for
    Gaussian noise a tenth of the seeds, at least one).

    The runs are spread over `processes` processes; `advance(done, of)` is called after each.
    """
    jobs = [
        _Job(method, seed, num_rounds)
        for method in METHODS
        for seed in range(max(1, num_seeds // 10) if "Gaussian" in method else num_seeds)
    ]
    results: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    # Spawned, not forked: a fork of a process with threads may never wake.
    with ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker) as pool:
        futures = {pool.submit(_run, job): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                job = futures[future]
                results[job.method][job.seed] = future.result()
                advance(done, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {
        method: np.array([by_seed[seed] for seed in sorted(by_seed)])
        for method, by_seed in results.items()
    }


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    # That unclipped runs diverge is what is to be shown.
    logging.getLogger("blackthorn").setLevel(logging.ERROR)


def _run(job: _Job) -> float:
    values = {**SETTING, **METHODS[job.method], "num-server-rounds": job.num_rounds}
    config = make_config({**values, "seed": job.seed})
    problem = load_problem(config)
    norms = []

    def watch(report: RoundReport) -> None:
        if report.server_round > job.num_rounds - LAST_ROUNDS:
            metrics = problem.task.evaluate(problem.model, report.model)
            norms.append(metrics["squared-norm"])

    run_in_engine(config, problem, [watch], evaluates=False)
    return float(np.mean(norms))


def cauchy_findings(figures: Mapping[str, np.ndarray]) -> list[Finding]:
    """What `cauchy` gave, held against what it should be."""
    fedavg, pr3, pr30 = figures["FedAvg"], figures["PR 3"], figures["PR 30"]
    pi3, gaussian = figures["PI 3"], figures["FedAvg, Gaussian"]
    above = Finding(
        "PR 30 above PI 3, share of seeds",
        f"{np.mean(pr30 > pi3):.0%}",
        "every seed",
        bool((pr30 > pi3).all()),
    )
    return [
        between("PI 3, largest", pi3.max(), -np.inf, 0.2),
        between("PI 3, median", float(np.median(pi3)), 0.02, 0.045),
        between("PR 30, smallest", pr30.min(), 0.05, 1.0),
        between("PR 30, largest", pr30.max(), 0.05, 1.0),
        above,
        between("PR 3, smallest", pr3.min(), 2.0, np.inf),
        between("FedAvg, smallest", fedavg.min(), 5.0, np.inf),
        between("FedAvg, share of seeds above 10", float(np.mean(fedavg > 10)), 0.9, 1.0),
        between("FedAvg with Gaussian noise, median", float(np.median(gaussian)), 0.01, 0.03),
    ]
