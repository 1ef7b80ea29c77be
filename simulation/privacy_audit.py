"""An empirical check of a recipe's privacy claims: each is attacked in runs of its own mechanism.

It can refute a claim, never prove one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import ArrayRecord

from server_app.build import frame_options
from server_app.config import ConfigError, RunConfig
from server_app.privacy import privacy_plan
from server_app.privacy_checks import claims_sample_privacy, is_noised
from server_app.robustness_checks import is_robust
from simulation.canaries import CanaryGrid, random_directions
from simulation.engine import EngineGrid
from simulation.sample_audit import attack_sample_claim
from strategies import DPFedAvg, DPNormFedAvg, FrameOptions, PrivacyPlan, spent
from strategies.auditing import Finding, lower_bound, one_shot_epsilon
from strategies.private_averaging import PrivateAveraging
from strategies.reports import RoundReport
from tasks.problem import Problem, load_problem

Build = Callable[[PrivacyPlan, FrameOptions], PrivateAveraging]
Advance = Callable[[int, int], None]
_FEWEST_RUNS = 2  # one half of them chooses the event, the other counts it


@dataclass(frozen=True)
class AuditResult:
    """What the attacks on all claims of a recipe found."""

    findings: Sequence[Finding]

    @property
    def refuted(self) -> bool:
        """Whether one of them contradicts its claim."""
        return any(finding.refutes for finding in self.findings)


def audit(
    config: RunConfig,
    *,
    canaries: int = 100,
    runs: int = 200,
    short_rounds: int = 1,
    short_delta: float = 0.05,
    confidence: float = 0.95,
    build: Build | None = None,
    advance: Advance = lambda done, total: None,  # noqa: ARG005
) -> AuditResult:
    """Attack every claim of the recipe, each in `runs` short runs with and as many without what its
    neighbours differ in; the central one also with `canaries` in one run of all its rounds. `build`
    makes the strategy (by default the product's).

    Raises ConfigError for a recipe that claims nothing, ValueError for too few canaries or runs.
    """
    plan = _claimed_plan(config)
    of_samples = claims_sample_privacy(config)
    if plan is None and not of_samples:
        raise ConfigError(
            f"the recipe with algorithm = {config.algorithm} makes no claim of privacy that an "
            "audit attacks: nothing to audit"
        )
    if runs < _FEWEST_RUNS:
        raise ValueError(f"runs = {runs} is not allowed: {_FEWEST_RUNS} or more")
    problem = load_problem(config)
    central = 0 if plan is None else 1 + 2 * runs
    total = central + 2 * runs * of_samples
    findings = []
    if plan is not None:
        make = build or _product(config)
        findings.append(_one_shot(config, problem, plan, make, canaries, confidence))
        advance(1, total)
        statistics: dict[bool, list[float]] = {True: [], False: []}
        for run in range(runs):
            for with_canary in (True, False):
                statistics[with_canary].append(
                    _short_run(config, problem, plan, make, with_canary, run, short_rounds)
                )
                advance(2 + 2 * run + (not with_canary), total)
        short = spent([(plan.release(), short_rounds)], short_delta, plan.accountant)
        present, absent = np.array(statistics[True]), np.array(statistics[False])
        bound = lower_bound(present, absent, short_delta, confidence)
        told = f"{runs} runs of {short_rounds} round(s) with one canary client and {runs} without"
        findings.append(Finding(told, short_delta, short.epsilon, bound))
    if of_samples:
        findings.append(
            attack_sample_claim(
                config,
                problem,
                runs,
                short_delta,
                confidence,
                lambda done: advance(central + done, total),
            )
        )
    return AuditResult(findings)


def _claimed_plan(config: RunConfig) -> PrivacyPlan | None:
    """The plan of the central claim; None where there is none."""
    if not is_noised(config) or is_robust(config):
        return None
    plan = privacy_plan(config)
    # An audit's clients are nobody's: their budget is not spent.
    return replace(plan, max_epsilon=None) if plan.claim else None


def _product(config: RunConfig) -> Build:
    kind = DPNormFedAvg if config.algorithm == "dp-normfedavg" else DPFedAvg
    return lambda plan, frame: kind(plan, **frame)


def _one_shot(
    config: RunConfig,
    problem: Problem,
    plan: PrivacyPlan,
    make: Build,
    canaries: int,
    confidence: float,
) -> Finding:
    directions = random_directions(canaries, problem.model.dimension, np.random.default_rng())
    released = _released(config, problem, plan, make, directions, plan.rounds)
    cosines = directions @ released / torch.linalg.vector_norm(released)
    found = one_shot_epsilon(cosines.numpy(), len(released), plan.delta, confidence)
    told = f"one run of {plan.rounds} rounds with {canaries} canary clients"
    claimed = plan.figure().epsilon
    return Finding(told, plan.delta, claimed, found.epsilon_low, estimate=found.epsilon)


def _short_run(
    config: RunConfig,
    problem: Problem,
    plan: PrivacyPlan,
    make: Build,
    present: bool,
    run: int,
    rounds: int,
) -> float:
    directions = random_directions(1, problem.model.dimension, np.random.default_rng([run, 0xA0D]))
    sent = directions if present else directions[:0]
    return float(directions[0] @ _released(config, problem, plan, make, sent, rounds))


def _released(
    config: RunConfig,
    problem: Problem,
    plan: PrivacyPlan,
    make: Build,
    directions: torch.Tensor,
    rounds: int,
) -> torch.Tensor:
    """Σ_t r a_t / C [d]: what a run released, in units of one client's largest contribution.

    The population has a place for every canary, present or not: r must not tell.
    """
    population = config.num_clients + max(1, len(directions))
    own = replace(plan, num_clients=population)
    total = torch.zeros(problem.model.dimension, dtype=torch.float64)

    def add(report: RoundReport) -> None:
        if report.aggregate is not None:
            bound = plan.clip_norm.in_gradient_units(report.local_lr)
            total.add_(report.aggregate.double(), alpha=own.cohort_size / bound)

    frame = frame_options(config, [add])
    del frame["participation"]
    frame["num_clients"], frame["start_timeout"] = population, 0.0
    strategy = make(own, frame)
    everybody = config.model_copy(update={"num_clients": population})
    grid = CanaryGrid(
        EngineGrid(everybody, problem),
        config.num_clients,
        directions,
        plan.clip_norm.in_gradient_units,
    )
    strategy.start(
        grid,
        ArrayRecord(problem.state()),
        num_rounds=rounds,
        evaluate_fn=lambda server_round, arrays: None,  # noqa: ARG005
    )
    return total
