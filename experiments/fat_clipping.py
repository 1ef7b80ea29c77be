"""FAT-Clipping (Yang et al.): what clipping is worth where gradients have fat tails."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch

from experiments.engine_run import EngineRun, run_in_lockstep
from experiments.finding import Finding, between
from server_app.config import make_config
from strategies.frame import Observer
from strategies.reports import RoundReport
from tasks.problem import Problem, load_problem

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
    "instruments": False,
}
METHODS: dict[str, dict[str, str | float]] = {
    "FedAvg": {"algorithm": "gfedavg"},
    "PR 3": {"algorithm": "fat-clipping-pr", "clip-norm": 3.0},
    "PR 30": {"algorithm": "fat-clipping-pr", "clip-norm": 30.0},
    "PI 3": {"algorithm": "fat-clipping-pi", "clip-norm": 3.0},
    "FedAvg, Gaussian": {"algorithm": "gfedavg", "noise-law": "gaussian"},
}
LAST_ROUNDS = 20


# So many seeds are run in lockstep: more would not make a run any faster.
_SEEDS_TOGETHER = 25


@dataclass(frozen=True)
class _Job:
    method: str
    seeds: range
    num_rounds: int


def cauchy(
    num_seeds: int = 100,
    *,
    num_rounds: int = 200,
    processes: int = 2,
    advance: Callable[[int, int], None] | None = None,
) -> dict[str, np.ndarray]:
    """The mean of ‖x‖² over the last 20 rounds by method: float64 [num_seeds], one a seed (for
    Gaussian noise a tenth of the seeds, at least one).

    The runs are spread over `processes` new processes, with 1 they are done in this one;
    `advance(done, of)` is called as runs end.
    """
    jobs = list(_jobs(num_seeds, num_rounds))
    total, done = sum(len(job.seeds) for job in jobs), 0
    results: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    for job, values in _run_all(jobs, processes):
        results[job.method].update(zip(job.seeds, values, strict=True))
        done += len(job.seeds)
        if advance is not None:
            advance(done, total)
    return {
        method: np.array([by_seed[seed] for seed in sorted(by_seed)])
        for method, by_seed in results.items()
    }


def _run_all(jobs: Sequence[_Job], processes: int) -> Iterator[tuple[_Job, list[float]]]:
    """What `_run` gives for each job, in the order in which they end."""
    if processes == 1:
        yield from ((job, _run(job)) for job in jobs)
        return
    # Spawned, not forked: a fork of a process with threads may never wake.
    with ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker) as pool:
        futures = {pool.submit(_run, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _jobs(num_seeds: int, num_rounds: int) -> Iterator[_Job]:
    for method in METHODS:
        seeds = range(max(1, num_seeds // 10) if "Gaussian" in method else num_seeds)
        for start in range(0, len(seeds), _SEEDS_TOGETHER):
            yield _Job(method, seeds[start : start + _SEEDS_TOGETHER], num_rounds)


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    # What is loaded by now stays: the collector need not look at it again and again.
    gc.freeze()
    # That unclipped runs diverge is what is to be shown.
    logging.getLogger("blackthorn").setLevel(logging.ERROR)


def _run(job: _Job) -> list[float]:
    """The mean of ‖x‖² over the last rounds, one a seed."""
    tails: list[list[float]] = [[] for _ in job.seeds]
    runs = []
    for seed, tail in zip(job.seeds, tails, strict=True):
        values = {**SETTING, **METHODS[job.method], "num-server-rounds": job.num_rounds}
        config = make_config({**values, "seed": seed})
        problem = load_problem(config)
        runs.append(EngineRun(config, problem, [_tail_observer(problem, job.num_rounds, tail)]))
    # The gradient is analytic: nothing has to be recorded for automatic differentiation.
    with torch.inference_mode():
        run_in_lockstep(runs)
    return [float(np.mean(tail)) for tail in tails]


def _tail_observer(problem: Problem, num_rounds: int, tail: list[float]) -> Observer:
    """Notes ‖x‖² in `tail` after each of the last rounds."""

    def watch(report: RoundReport) -> None:
        if report.server_round > num_rounds - LAST_ROUNDS:
            tail.append(problem.task.evaluate(problem.model, report.model)["squared-norm"])

    return watch


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
