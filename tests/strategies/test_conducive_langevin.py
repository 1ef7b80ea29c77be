"""Conducive gradients (FSGLD): the fit, the steps, and the law that they lead to, against closed
forms that are computed here from the rows alone."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from linear_law import data_of, w2
from mutants import mutated
from rich.console import Console

from blackthorn.client_app.clientapp import app
from blackthorn.client_app.disclosure import Level, PublicRefusal, check_tells
from blackthorn.client_app.round import Round
from blackthorn.client_app.training import train_clients
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.server_app.build import build_strategy
from blackthorn.settings.config import ConfigError, RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import ConduciveLangevin, RoundContext, conducive_langevin
from blackthorn.strategies.attestation import Attestation
from blackthorn.strategies.fed_langevin import LangevinSteps
from blackthorn.strategies.local_rule import ClientRound, LocalSGD
from blackthorn.strategies.noise import SystemRandomness
from blackthorn.tasks.problem import load_problem

ETA, STEPS, DRAWS, CLIENTS, PRIOR = 2e-4, 10, 5, 20, 1.0
RECIPE = Path(__file__).parents[2] / "recipes" / "fsgld-bayes-linear.toml"


def config_of(surrogate: str, folder: Path | None = None, **options: Any) -> RunConfig:
    values = {key.replace("_", "-"): value for key, value in options.items()}
    own = f'surrogate = "{surrogate}"' + values.pop("own", "")
    values |= {"algorithm-options": own, "langevin-seed": 3, "report": False}
    return recipe_config(RECIPE, (), {**values, "output-dir": str(folder or "unused")})


def fitted(
    config: RunConfig, rounds: int = 5, start: np.ndarray | None = None
) -> ConduciveLangevin:
    """Its strategy after so many rounds: four of a full fit in three dimensions, and one more."""
    strategy = build_strategy(config)
    assert isinstance(strategy, ConduciveLangevin)
    problem = load_problem(config)
    told = ConfigRecord({"seed": config.seed})
    initial = problem.model.module if start is None else ArrayRecord({"x": Array(start)})
    strategy.start(EngineGrid(config, problem), initial, rounds, train_config=told)
    return strategy


class Rows:
    """H_c = Σ x xᵀ and h_c = Σ x y of every client, and of the posterior A and b."""

    def __init__(self, config: RunConfig) -> None:
        data = data_of(config)
        self.curvature = [rows.T @ rows for rows in data.x]
        self.linear = [rows.T @ targets for rows, targets in zip(data.x, data.y, strict=True)]
        self.share, self.total = data.share, data.total
        self.a = sum(self.curvature) + PRIOR * np.eye(config.problem_dimension)
        self.b = sum(self.linear)

    @property
    def target(self) -> tuple[np.ndarray, np.ndarray]:
        return np.linalg.solve(self.a, self.b), np.linalg.inv(self.a)


def memories(strategy: ConduciveLangevin, d: int = 3) -> dict[int, np.ndarray]:
    """What the server would send each client in a round of the chain."""
    context = RoundContext(10_000, ETA, torch.zeros(d, dtype=torch.float64))
    sent = strategy._memories(sorted(strategy._shares), context)
    return {client: memory.numpy() for client, memory in sent.items()}


def moved(memory: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """e + Bθ."""
    d = len(theta)
    pull, curvature = memory[:d], memory[d:]
    if len(curvature) == d:
        return pull + curvature * theta
    return pull + curvature.reshape(d, d) @ theta if len(curvature) else pull


def check_fit(kind: str = "full") -> None:
    """The parts are the gradient at θ̂ and the curvature, or its diagonal, of −log p_s."""
    config = config_of(kind, initial_point=0.3)
    rows, values = Rows(config), fitted(config).own_values()
    centre = values["fit-centre"]
    np.testing.assert_array_equal(centre, np.full(3, 0.3))
    for client in range(CLIENTS):
        parts = values[f"fit-{client}"].reshape(-1, 3)
        h = rows.curvature[client]
        gradient = h @ centre - rows.linear[client]
        np.testing.assert_allclose(parts[0], gradient, rtol=1e-7, atol=1e-7)
        expected = {"full": h, "diagonal": np.diag(h)[None], "linear": np.empty((0, 3))}[kind]
        np.testing.assert_allclose(parts[1:], expected, rtol=1e-5, atol=1e-5)


def check_mean_is_kept(kind: str = "full") -> None:
    """Σ_s f_s [∇ log q − (1/f_s) ∇ log q_s] = 0 everywhere, also where a client has no q_s."""
    strategy = fitted(config_of(kind))
    for _ in range(2):
        sent = memories(strategy)
        for theta in np.random.default_rng(1).standard_normal((3, 3)):
            pulls = [strategy._shares[c] * moved(memory, theta) for c, memory in sent.items()]
            scale = max(np.abs(pull).max() for pull in pulls)
            assert np.abs(sum(pulls)).max() < 1e-10 * scale
        values = strategy.own_values()
        values.pop("fit-4", None)
        strategy.restore_own(values)


def implemented(
    config: RunConfig, strategy: ConduciveLangevin, starts: np.ndarray
) -> dict[int, np.ndarray]:
    """Every client's model after one of our steps without noise, from each of `starts` [B, 3]."""
    problem = load_problem(config)
    shards, sent, share = problem.shards(), memories(strategy), Rows(config).share
    rule = strategy.local_rule(RoundContext(9_999, ETA, torch.zeros(3)))
    assert isinstance(rule, conducive_langevin.ConduciveSteps)
    quiet = type(rule)(ETA, 0.0, 0.0, PRIOR)
    found = {}
    for client, memory in sent.items():
        told = {"share": float(share[client]), "total-examples": Rows(config).total}
        of = ClientRound(
            client, 7, told, torch.from_numpy(memory), np.random.default_rng, SystemRandomness
        )
        steps = quiet.steps(LocalSGD(1, 0, ETA), len(starts), partial(lambda one, _: one, of))
        unused = [np.random.default_rng(0)] * len(starts)
        trained, _ = train_clients(
            problem.model, torch.from_numpy(starts), [shards[client]] * len(starts), steps, unused
        )
        found[client] = trained.numpy()
    return found


def check_exact_steps() -> None:
    """With exact Gaussians every client's step is θ − η(Aθ − b), that of all data together."""
    config = config_of("full")
    rows, starts = Rows(config), np.random.default_rng(2).standard_normal((4, 3))
    expected = starts - ETA * (starts @ rows.a - rows.b)
    for found in implemented(config, fitted(config), starts).values():
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


def check_noise_of_a_round() -> None:
    """Σ w_c² · 2ητ/(what the client was told) is 2ητ, whoever is drawn how often."""
    strategy = fitted(config_of("full"))
    for server_round in range(50, 90):
        plan = strategy.draw_cohort([], RoundContext(server_round, ETA, torch.zeros(3)))
        total = sum(plan.counts.values())
        assert total == DRAWS
        told = {client: plan.told[client]["share"] for client in plan.clients}
        weights = {client: count / total for client, count in plan.counts.items()}
        assert sum(weights[c] ** 2 / told[c] for c in told) == pytest.approx(1.0)
        assert {plan.told[c]["total-examples"] for c in told} == {Rows(config_of("full")).total}


@pytest.mark.parametrize("kind", ["linear", "diagonal", "full"])
def test_a_fit_is_the_gradient_and_curvature_of_the_client_s_likelihood(kind: str) -> None:
    check_fit(kind)


@pytest.mark.parametrize("kind", ["linear", "diagonal", "full"])
def test_conducive_gradients_have_the_mean_zero_whatever_q_is(kind: str) -> None:
    check_mean_is_kept(kind)


def test_with_exact_gaussians_every_client_s_step_is_that_of_all_data() -> None:
    check_exact_steps()


def test_the_noise_of_a_round_is_2_eta_tau_whoever_is_drawn() -> None:
    check_noise_of_a_round()


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("rest = q - fitted", "rest = q + fitted", check_mean_is_kept),
        ("/ self._shares[client]\n            #", "\n            #", check_mean_is_kept),
        ("pull - curvature @ self._centre", "pull + curvature @ self._centre", check_exact_steps),
        ("alpha=1 / self.total_examples", "alpha=1.0", check_exact_steps),
        ("pull + torch.einsum", "pull - torch.einsum", check_exact_steps),
        ("scale * gradients", "gradients", check_fit),
        ("scale * gradients", "gradients", check_exact_steps),
        ("- kept[0]) / h[row]", "- kept[0])", check_fit),
        ("start - self.local_lr * gradients", "start + self.local_lr * gradients", check_fit),
        ("context.model.double()", "0 * context.model.double()", check_fit),
    ],
)
def test_a_mutation_is_caught(old: str, new: str, check: Callable[[], None]) -> None:
    with mutated(conducive_langevin, (old, new)), pytest.raises(AssertionError):
        check()


def test_noise_by_the_share_of_all_examples_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConduciveLangevin, "share_of_noise", "population")
    with pytest.raises(AssertionError):
        check_noise_of_a_round()


# The law of the chain.


def stationary(
    maps: list[tuple[np.ndarray, np.ndarray]], rows: Rows, own_noise: str
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance that a round of five draws leaves as they are; `maps`: M_c and r_c of a
    step θ ← M_c θ + r_c. E[w wᵀ] of the draws is diag(p)/S + (1 − 1/S) p pᵀ.

    `own_noise`: a client's has the variance 2η/p_c ("population"), or what makes the round's 2η.
    """
    p, d = rows.share, 3
    eye = np.eye(d)
    second = np.diag(p) / DRAWS + (1 - 1 / DRAWS) * np.outer(p, p)
    powers = [[np.linalg.matrix_power(m, j) for j in range(STEPS + 1)] for m, _ in maps]
    ends = [one[STEPS] for one in powers]
    offsets = [sum(one[:STEPS]) @ r for one, (_, r) in zip(powers, maps, strict=True)]
    mean = np.linalg.solve(
        eye - sum(q * m for q, m in zip(p, ends, strict=True)),
        sum(q * r for q, r in zip(p, offsets, strict=True)),
    )
    own = np.diag(second) / p if own_noise == "population" else p
    constant = sum(
        q * 2 * ETA * sum(k @ k.T for k in one[:STEPS]) for q, one in zip(own, powers, strict=True)
    )
    shifts = [m @ mean + r - mean for m, r in zip(ends, offsets, strict=True)]
    operator = np.zeros((d * d, d * d))
    for c, e in itertools.product(range(len(p)), repeat=2):
        operator += second[c, e] * np.kron(ends[c], ends[e])
        constant = constant + second[c, e] * np.outer(shifts[c], shifts[e])
    solved = np.linalg.solve(np.eye(d * d) - operator, np.asarray(constant).reshape(-1))
    return mean, solved.reshape(d, d)


def scheme_1(rows: Rows) -> float:
    """W2 of FA-LD's scheme I to the posterior, ρ = 0, from the algorithm's box."""
    maps = []
    for h, linear, p in zip(rows.curvature, rows.linear, rows.share, strict=True):
        maps.append((np.eye(3) - ETA * (h / p + PRIOR * np.eye(3)), ETA * linear / p))
    return w2(*stationary(maps, rows, "population"), *rows.target)


def conducive(kind: str, centre: np.ndarray | None = None) -> float:
    """W2 by the steps read off our code, from unit vectors, for a fit at `centre`."""
    config = config_of(kind)
    rows = Rows(config)
    starts = np.concatenate([np.zeros((1, 3)), np.eye(3)])
    maps = []
    for ended in implemented(config, fitted(config, 5, centre), starts).values():
        maps.append(((ended[1:] - ended[0]).T, ended[0]))
    return w2(*stationary(maps, rows, "round"), *rows.target)


def test_w2_under_five_of_twenty_is_a_fifth_of_scheme_i_s_and_less() -> None:
    """At ρ = 0. Exact Gaussians: the law is SGLD's on all data, far closer still."""
    rows = Rows(config_of("full"))
    plain, exact = scheme_1(rows), conducive("full")
    assert exact < plain / 100
    centre, covariance = rows.target
    sgld = np.linalg.inv(rows.a - ETA * rows.a @ rows.a / 2)
    assert exact == pytest.approx(w2(centre, sgld, centre, covariance), rel=1e-3)
    # From where the chain begins a diagonal is not enough, from nearby it is.
    assert plain / 5 < conducive("diagonal") < plain
    assert conducive("diagonal", centre) < plain / 5
    assert conducive("linear", centre) < plain / 5


@pytest.mark.slow
def test_a_run_s_w2_is_a_fifth_of_scheme_i_s_and_less(tmp_path: Path) -> None:
    found = {}
    for name, values in {
        "fsgld": {},
        "diagonal": {"algorithm-options": 'surrogate = "diagonal", refit-every = 50'},
        "fa-ld": {"algorithm": "fa-ld", "algorithm-options": ""},
    }.items():
        plain = {"langevin-seed": 3, "report": False, "output-dir": str(tmp_path / name)}
        summary = simulate(recipe_config(RECIPE, (), {**values, **plain}), Console(quiet=True))
        found[name] = summary["posterior"]["w2"]
    assert max(found["fsgld"], found["diagonal"]) < found["fa-ld"] / 5


# Rounds of a fit, and who may be asked for one.


def test_a_fit_leaves_the_model_and_adds_no_sample(tmp_path: Path) -> None:
    options = {"num_server_rounds": 8, "burn_in": 0, "own": ", refit-every = 4"}
    config = config_of("diagonal", tmp_path / "run", **options)
    skipped: list[str | None] = []
    summary = simulate(config, Console(quiet=True), observers=[lambda r: skipped.append(r.skipped)])
    told = [f"the clients' likelihoods are fitted: round {part} of 2" for part in (1, 2)]
    # Round 0 is the first model's.
    assert skipped == [None, *2 * [*told, None, None]]
    assert summary["posterior"]["samples"] == 4


def test_a_client_that_misses_a_part_has_no_gaussian() -> None:
    strategy = ConduciveLangevin(ETA, surrogate="linear", num_clients=2)
    strategy._shares = {0: 0.5, 1: 0.5}
    context = RoundContext(1, ETA, torch.zeros(3), accepted=(1,))
    with pytest.raises(ValueError, match="likelihoods are fitted: round 1 of 1"):
        strategy.combine(torch.ones(1, 3), torch.ones(1), context)
    later = RoundContext(2, ETA, torch.zeros(3))
    sent = strategy.draw_cohort([], later).memories
    assert sent[0].tolist() == [1.0] * 3
    assert sent[1].tolist() == [-1.0] * 3


@pytest.mark.parametrize(
    ("rounds", "own", "expected"),
    [
        (4, "", "takes 4 rounds: more rounds are needed, in all (4)"),
        (9, ", refit-every = 3", "refit-every = 3"),
    ],
)
def test_too_few_rounds_for_a_fit_are_refused(rounds: int, own: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        fitted(config_of("full", own=own), rounds)
    assert expected in str(caught.value)


def test_a_full_curvature_of_a_network_is_refused(tmp_path: Path) -> None:
    values = {"algorithm": "fsgld", "algorithm-options": 'surrogate = "full"', "model": "logistic"}
    config = make_config({**values, "num-clients": 3, "output-dir": str(tmp_path)})
    with pytest.raises(ValueError, match="full is not allowed for a model of 650 numbers"):
        fitted(config)


@pytest.mark.parametrize("own", ['surrogate = "cubic"', "probes = 3", "refit-every = -1"])
def test_wrong_options_give_one_line(own: str) -> None:
    config = make_config({"algorithm": "fsgld", "algorithm-options": own})
    with pytest.raises(ConfigError, match="algorithm-options: ") as caught:
        build_strategy(config)
    assert "\n" not in str(caught.value)


def test_under_a_privacy_claim_nobody_sends_a_fit() -> None:
    with pytest.raises(ConfigError, match="not allowed with algorithm fsgld"):
        make_config({"algorithm": "fsgld", "local-dp-sgd": True, "dp-sgd-sample-rate": 0.5})
    claims: list[Level] = ["client", "sample"]
    for claim in claims:
        with pytest.raises(PublicRefusal, match="no client sends its likelihood"):
            check_tells(claim, conducive_langevin.FitGradient.tells)
        check_tells(claim, LangevinSteps.tells)
    check_tells("none", conducive_langevin.FitGradient.tells)


def test_a_server_that_claims_privacy_gets_no_fit_from_anybody_s_client_app() -> None:
    """Nor from ours, whose configuration claims nothing."""
    config = config_of("linear")
    problem = load_problem(config)
    rule = conducive_langevin.FitGradient().sent
    told: dict[str, Any] = {"server-round": 1, "local-lr": ETA, "client-id": 0}
    told |= {"share": 0.5, "total-examples": 9}
    content = RecordDict({"arrays": ArrayRecord(problem.state()), "rule": rule.record()})
    content["config"] = ConfigRecord({**told, "claim": "client"})
    message = Message(content, 1001, "train")
    with pytest.raises(PublicRefusal, match="no client sends its likelihood"):
        Round(message)
    node: dict[str, Any] = {"partition-id": 0}
    context = Context(1, 1001, node, RecordDict(), to_mapping(config))
    with pytest.raises(PublicRefusal, match="claims the clients' privacy"):
        app(message, context)
    content["config"] = ConfigRecord(told)
    assert Attestation(rule, 1).is_in(app(Message(content, 1001, "train"), context).content)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_hadamard_s_rows_are_orthogonal(size: int) -> None:
    rows = torch.stack([conducive_langevin.hadamard(r, size, size) for r in range(size)])
    assert torch.equal(rows @ rows.T, size * torch.eye(size, dtype=torch.float64))
