"""An empirical check of a recipe's privacy claims: each is attacked in runs of its own mechanism.

It can refute a claim, never prove one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from blackthorn.recording.privacy import privacy_plan
from blackthorn.server_app.build import check_names, strategy_options
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.own_code import is_own_code
from blackthorn.settings.privacy_checks import claims_sample_privacy, has_central_claim, is_noised
from blackthorn.simulation.auditing import Finding, lower_bound, one_shot_epsilon
from blackthorn.simulation.canaries import CanaryGrid, random_directions
from blackthorn.simulation.engine import EngineGrid
from blackthorn.simulation.noise_audit import attack_local_claim
from blackthorn.simulation.sample_audit import attack_sample_claim
from blackthorn.strategies import PrivacyPlan, StrategyOptions, spent
from blackthorn.strategies.algorithms import algorithm_class, check_own_mechanism
from blackthorn.strategies.options import PrivateOptions
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import Problem, load_problem

Build = Callable[[PrivacyPlan, StrategyOptions], PrivateAveraging]
Advance = Callable[[int, int], None]
Done = Callable[[int], None]
_FEWEST_RUNS = 2  # one half of them chooses the event, the other counts it


@dataclass(frozen=True)
class AuditResult:
    """What the attacks on all claims of a recipe found; `confidence` is that of all their lower
    bounds together."""

    findings: Sequence[Finding]
    confidence: float = 0.95

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
    neighbours differ in; the central one also with `canaries` in one run of all its rounds and,
    where the clients add the noise, with a canary whose fellows all fail. `build` makes the
    strategy (by default the product's). A mechanism that keeps its claims is refuted with
    probability 1 - `confidence` at most, which the attacks share.

    Raises ConfigError for a recipe that claims nothing, or may not, ValueError for too few canaries
    or runs.
    """
    check_names(config)
    plan, of_samples = _claimed_plan(config), claims_sample_privacy(config)
    if plan is None and not of_samples:
        raise ConfigError(
            f"the recipe with algorithm = {config.algorithm} makes no claim of privacy that an "
            "audit attacks: nothing to audit"
        )
    if runs < _FEWEST_RUNS:
        raise ValueError(f"runs = {runs} is not allowed: {_FEWEST_RUNS} or more")
    problem = load_problem(config)
    central_claim = plan is not None and has_central_claim(config)
    at_clients = plan is not None and plan.noise_location == "client"
    findings_to_come = central_claim * (2 + at_clients) + 2 * at_clients + of_samples
    sure = 1 - (1 - confidence) / findings_to_come
    how = (runs, short_delta, sure)
    attacks: list[Callable[[Done], list[Finding]]] = []
    if plan is not None and central_claim:
        central = _Central(config, problem, plan, build or _product(config))
        # Of clients that take turns each has had one, the canary too.
        short_rounds = max(short_rounds, plan.groups)
        attacks.append(lambda done: [central.one_shot(canaries, sure)])  # noqa: ARG005
        attacks.append(lambda done: [central.short_runs(short_rounds, *how, done)])
        if at_clients:
            attacks.append(lambda done: [central.lonely_runs(*how, done)])
    if plan is not None and at_clients:
        attacks.append(lambda done: attack_local_claim(config, problem, plan, *how, done))
    if of_samples:
        attacks.append(lambda done: [attack_sample_claim(config, problem, *how, done)])
    findings, steps = [], 2 * runs
    for position, attack in enumerate(attacks):
        findings += attack(_from(advance, position * steps, len(attacks) * steps))
    return AuditResult(findings, confidence)


def _from(advance: Advance, before: int, total: int) -> Done:
    return lambda done: advance(before + done, total)


def _claimed_plan(config: RunConfig) -> PrivacyPlan | None:
    """The plan of the clients' claims; None where there are none."""
    if not is_noised(config):
        return None
    plan = privacy_plan(config)
    # An audit's clients are nobody's: their budget is not spent.
    return replace(plan, max_epsilon=None) if plan.claim else None


def _product(config: RunConfig) -> Build:
    def build(plan: PrivacyPlan, options: StrategyOptions) -> PrivateAveraging:
        strategy = algorithm_class(config).build(config, PrivateOptions(**options, privacy=plan))
        assert isinstance(strategy, PrivateAveraging)  # as there is a plan
        if is_own_code(config.algorithm):
            check_own_mechanism(strategy, plan, options, None)
        return strategy

    return build


@dataclass(frozen=True)
class _Central:
    """The attacks on the claim of the released models, by canary clients."""

    config: RunConfig
    problem: Problem
    plan: PrivacyPlan
    make: Build

    def one_shot(self, canaries: int, confidence: float) -> Finding:
        """One run of all rounds with many canaries."""
        generator = np.random.default_rng()
        directions = random_directions(canaries, self.problem.model.dimension, generator)
        released = self._released(directions, self.plan.rounds)
        cosines = directions @ released / torch.linalg.vector_norm(released)
        found = one_shot_epsilon(cosines.numpy(), len(released), self.plan.delta, confidence)
        told = f"one run of {self.plan.rounds} rounds with {canaries} canary clients"
        claimed = self.plan.figure().epsilon
        return Finding(told, self.plan.delta, claimed, found.epsilon_low, estimate=found.epsilon)

    def short_runs(
        self, rounds: int, runs: int, delta: float, confidence: float, done: Done
    ) -> Finding:
        """`runs` runs with one canary and as many without, by what went along its direction."""
        present, absent = self._with_and_without(rounds, runs, done)
        found = lower_bound(present[:, 0], absent[:, 0], delta, confidence)
        told = f"{runs} runs of {rounds} round(s) with one canary client and {runs} without"
        return Finding(told, delta, self._claimed(rounds, delta), found)

    def lonely_runs(self, runs: int, delta: float, confidence: float, done: Done) -> Finding:
        """The same of one round in which all others fail, by the length of what was released, too:
        noise that comes with the clients who answer would tell whether one did."""
        present, absent = self._with_and_without(1, runs, done, alone=True)
        # Three bounds, each so much surer: along the direction, and longer or shorter.
        sure = 1 - (1 - confidence) / 3
        found = max(
            lower_bound(sign * present[:, figure], sign * absent[:, figure], delta, sure)
            for figure, sign in ((0, 1), (1, 1), (1, -1))
        )
        told = f"{runs} rounds in which a canary client alone answers, and {runs} without it"
        return Finding(told, delta, self._claimed(1, delta), found)

    def _claimed(self, rounds: int, delta: float) -> float:
        return spent([(self.plan.release(), rounds)], delta, self.plan.accountant).epsilon

    def _with_and_without(
        self, rounds: int, runs: int, done: Done, *, alone: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """What was released [runs, 2] with the canary and without: how far along its direction, and
        how far at all."""
        seen: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for run in range(runs):
            generator = np.random.default_rng([run, 0xA0D])
            directions = random_directions(1, self.problem.model.dimension, generator)
            for present in (True, False):
                sent = directions if present else directions[:0]
                released = self._released(sent, rounds, alone=alone)
                length = float(torch.linalg.vector_norm(released))
                seen[present].append((float(directions[0] @ released), length))
                done(2 * run + 1 + (not present))
        return np.array(seen[True]), np.array(seen[False])

    def _released(
        self, directions: torch.Tensor, rounds: int, *, alone: bool = False
    ) -> torch.Tensor:
        """Σ_t r a_t / C [d]: what a run released, in units of one client's largest contribution.

        The population has a place for every canary, present or not: r must not tell.
        """
        config, bound = self.config, self.plan.clip_norm.in_gradient_units
        population = config.num_clients + max(1, len(directions))
        # Only places are added: the claim, and its delta, are those of the recipe's population.
        own = replace(self.plan, num_clients=population, delta=min(self.plan.delta, 1 / population))
        total = torch.zeros(self.problem.model.dimension, dtype=torch.float64)

        def add(report: RoundReport) -> None:
            if report.aggregate is not None:
                alpha = own.cohort_size / bound(report.local_lr)
                total.add_(report.aggregate.double(), alpha=alpha)

        options = strategy_options(config, [add])
        del options["participation"]
        options["num_clients"], options["start_timeout"] = population, 0.0
        strategy = self.make(own, options)
        everybody = EngineGrid(config.model_copy(update={"num_clients": population}), self.problem)
        strategy.start(
            CanaryGrid(everybody, config.num_clients, directions, bound, alone),
            self.problem.model.module,
            num_rounds=rounds,
            evaluate_fn=lambda server_round, arrays: None,  # noqa: ARG005
        )
        return total
