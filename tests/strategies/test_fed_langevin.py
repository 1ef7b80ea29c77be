"""FedLangevin on the server: who is drawn, what counts how often, what the clients are told."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from langevin_checks import enrolled_grid
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs, trained, vector_of
from safetensors.numpy import load_file

from blackthorn.client_app.clientapp import app
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.prepared_run import PreparedRun
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import ConfigError, RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import FedLangevin, RoundContext, RoundReport
from blackthorn.tasks.problem import Problem, load_problem


def run(strategy: FedLangevin, grid: MemoryGrid, rounds: int = 3) -> np.ndarray:
    result = strategy.start(grid, initial_model(), num_rounds=rounds, timeout=60.0)
    return vector_of(result.arrays)


def averaged(w: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """The clients' models after training from w, weighted by their shares."""
    return np.stack([share * trained(w, c) for c, share in enumerate(shares)]).sum(axis=0)


def test_full_participation_averages_by_the_enrolled_shares() -> None:
    """Every reply claims a thousand million examples, and changes nothing by it."""
    found = run(FedLangevin(0.5, num_clients=3), enrolled_grid([10, 20, 70]))
    w = vector_of(initial_model())
    for _ in range(3):
        w = averaged(w, (0.1, 0.2, 0.7))
    np.testing.assert_allclose(found, w, rtol=2e-5, atol=2e-5)


def test_every_client_is_told_its_share_and_the_same_secret() -> None:
    seeds = []
    for _ in range(2):
        grid = enrolled_grid([10, 30])
        run(FedLangevin(0.5, num_clients=2), grid, rounds=2)
        orders = [m for m in grid.sent if m.metadata.message_type == "train"]
        told = [dict(m.content.config_records["config"]) for m in orders]
        assert [(t["client-id"], t["share"]) for t in told] == 2 * [(0, 0.25), (1, 0.75)]
        assert {t["total-examples"] for t in told} == {40}
        assert len({t["shared-seed"] for t in told}) == 1
        seeds.append(told[0]["shared-seed"])
    assert seeds[0] != seeds[1]


def test_clients_that_are_known_by_their_keys_declare_their_counts_too() -> None:
    grid = enrolled_grid([10, 30, 60])
    found = run(FedLangevin(0.5, num_clients=3, identity="key"), grid, 1)
    again = run(FedLangevin(0.5, num_clients=3), enrolled_grid([10, 30, 60]), 1)
    np.testing.assert_array_equal(found, again)


def test_a_client_that_enrols_later_is_not_part_of_the_posterior() -> None:
    class Growing(MemoryGrid):
        def get_node_ids(self) -> list[int]:
            late = any(m.metadata.message_type == "train" for m in self.sent)
            return [100, 101, 102] if late else [100, 101]

    grid = Growing(enrolled_grid([10, 30, 500]).nodes)
    run(FedLangevin(0.5, num_clients=2), grid, rounds=4)
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert set(asked) == {100, 101}


def flaky_grid(silent_in: int) -> MemoryGrid:
    """Clients with 10, 30 and 60 examples, of which the second one fails once."""
    grid = enrolled_grid([10, 30, 60])
    answers = 0
    flaky = quadratic_app(1, enrols={"client-id": 1, "num-examples": 30}, attests=True)
    good = runs(flaky)

    def raises_once(message: Message) -> Message | None:
        nonlocal answers
        if message.metadata.message_type == "train":
            answers += 1
            if answers == silent_in:
                return Message(Error(2, "power cut"), reply_to=message)
        return good(message)

    grid.nodes[101] = raises_once
    return grid


def test_where_a_client_is_missing_the_others_stand_in() -> None:
    found = run(FedLangevin(0.5, num_clients=3), flaky_grid(2))
    w = vector_of(initial_model())
    for shares in ((0.1, 0.3, 0.6), (0.1 / 0.7, 0, 0.6 / 0.7), (0.1, 0.3, 0.6)):
        w = averaged(w, shares)
    np.testing.assert_allclose(found, w, rtol=2e-5, atol=2e-5)


def test_a_round_with_a_missing_client_is_skipped_where_that_is_asked_for() -> None:
    reports: list[RoundReport] = []
    strategy = FedLangevin(0.5, num_clients=3, missing="skip", observers=[reports.append])
    found = run(strategy, flaky_grid(2))
    w = vector_of(initial_model())
    for _ in range(2):
        w = averaged(w, (0.1, 0.3, 0.6))
    np.testing.assert_allclose(found, w, rtol=2e-5, atol=2e-5)
    told = [(report.skipped, report.below_quorum) for report in reports]
    assert told == [(None, False), ("2 replies, fewer than 3", True), (None, False)]


@pytest.mark.parametrize("scheme", ["with-replacement", "without-replacement"])
def test_only_those_who_were_drawn_can_be_missing(scheme: Any) -> None:
    """However few of the population are drawn, and twice or once: no round lacks anybody."""
    reports: list[RoundReport] = []
    options: dict[str, Any] = {"scheme": scheme, "draws": 2, "num_clients": 3, "missing": "skip"}
    run(FedLangevin(0.5, observers=[reports.append], **options), enrolled_grid([30] * 3), 8)
    assert [report.skipped for report in reports] == [None] * 8


def test_a_run_with_decaying_steps_is_theorem_5_8_s(tmp_path: Path) -> None:
    """τ = 0, full batches: θ_c ← θ_c − η_k (n/n_c Σ x(⟨x, θ⟩ − y) + λθ), k = 1, 2, …"""
    eta, m, steps, rounds = 1e-3, 400.0, 3, 4
    config = langevin_config(
        step_size="decaying",
        strong_convexity=m,
        local_lr=eta,
        temperature=0.0,
        batch_size=0,
        num_server_rounds=rounds,
        output_dir=str(tmp_path / "run"),
    )
    prepared = prepare(config)
    execute(prepared, EngineGrid(config, prepared.problem))
    shards = prepared.problem.shards()
    data = [[part.numpy() for part in s.batch(np.random.default_rng(0), 0)] for s in shards]
    n = sum(len(y) for _, y in data)
    theta = prepared.problem.state()["x"].numpy()
    for t in range(rounds):
        ends = []
        for x, y in data:
            own = theta.copy()
            for k in range(t * steps + 1, (t + 1) * steps + 1):
                gradient = n / len(y) * x.T @ (x @ own - y) + own
                own = own - gradient / (1 / eta + m * k / 12)
            ends.append(len(y) / n * own)
        theta = np.sum(ends, axis=0)
    found = load_file(tmp_path / "run" / "checkpoints" / "final.safetensors")["x"]
    np.testing.assert_allclose(found, theta, rtol=1e-9)


def cohorts(strategy: FedLangevin, counts: list[int], rounds: int) -> list[Counter[int]]:
    """How often every client counts in each round, from the weights of the reports."""
    seen: list[Counter[int]] = []

    def count(report: RoundReport) -> None:
        assert report.weights is not None and strategy._draws is not None
        counts = (report.weights * strategy._draws).round().int().tolist()
        seen.append(Counter(dict(zip(report.accepted, counts, strict=True))))

    strategy._observers.append(count)
    run(strategy, enrolled_grid(counts), rounds)
    return seen


def test_scheme_i_draws_by_the_shares() -> None:
    strategy = FedLangevin(0.5, scheme="with-replacement", draws=4, num_clients=3)
    rounds = cohorts(strategy, [10, 30, 60], 150)
    assert all(sum(counts.values()) == 4 for counts in rounds)
    total = sum(rounds, Counter())
    for client, p in enumerate((0.1, 0.3, 0.6)):
        error = np.sqrt(600 * p * (1 - p))
        assert abs(total[client] - 600 * p) < 4 * error
    assert any(max(counts.values()) > 1 for counts in rounds)


def test_scheme_ii_draws_distinct_clients_alike() -> None:
    strategy = FedLangevin(0.5, scheme="without-replacement", draws=2, num_clients=4)
    rounds = cohorts(strategy, [30, 30, 30, 30], 120)
    assert all(sorted(counts.values()) == [1, 1] for counts in rounds)
    total = sum(rounds, Counter())
    for client in range(4):
        assert abs(total[client] - 60) < 4 * np.sqrt(120 / 4)


def test_scheme_ii_refuses_unbalanced_data() -> None:
    strategy = FedLangevin(0.5, scheme="without-replacement", draws=1, num_clients=2)
    with pytest.raises(ValueError, match="balanced data: client 1 has 3 times"):
        run(strategy, enrolled_grid([10, 30]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scheme": "third"}, "scheme = 'third'"),
        ({"scheme": "with-replacement"}, "draws = 0"),
        ({"missing": "wait"}, "missing = 'wait'"),
        ({"identity": "node"}, "must declare their counts"),
        ({"weighting": "num-examples"}, "weighting is not an option"),
    ],
)
def test_options_that_the_scheme_cannot_have_are_refused(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        FedLangevin(0.5, **options)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"server-lr": 0.5}, "server-lr = 0.5 is not allowed with algorithm fa-ld"),
        ({"server-momentum": 0.9}, "server-momentum = 0.9"),
        ({"weight-decay": 0.1}, "weight-decay = 0.1"),
        ({"local-lr-decay": 0.9}, "local-lr-decay = 0.9"),
        ({"weighting": "num-examples"}, "weighting = num-examples"),
        ({"aggregator": "rage"}, "aggregator = rage"),
        ({"participation": "poisson", "sample-rate": 0.5}, "participation = poisson"),
        ({"participation": "with-replacement"}, "at least 1 draw"),
        ({"step-size": "decaying"}, "strong-convexity = 0.0"),
        ({"burn-in": 10}, "burn-in = 10 is not allowed with num-server-rounds = 10"),
        ({"shared-noise": 1.5}, "shared-noise = 1.5"),
        ({"temperature": -1.0}, "temperature = -1.0"),
    ],
)
def test_wrong_configurations_give_one_line(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"algorithm": "fa-ld", **values})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scheme_i_belongs_to_fa_ld() -> None:
    with pytest.raises(ConfigError, match="with-replacement is not allowed with algorithm gfed"):
        make_config({"participation": "with-replacement", "clients-per-round": 3})


def test_unbalanced_data_for_scheme_ii_are_found_before_a_run(tmp_path: Path) -> None:
    config = langevin_config(
        participation="fixed", clients_per_round=2, output_dir=str(tmp_path / "run")
    )
    with pytest.raises(ConfigError, match="balanced data: client 3 has 3 times"):
        prepare(config)
    assert not (tmp_path / "run").exists()


# The engine against the ClientApp of a deployment.


def langevin_config(**values: Any) -> RunConfig:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    defaults = {
        "algorithm": "fa-ld",
        "task": "bayes-linear",
        "dtype": "float64",
        "problem-dimension": 3,
        "examples-per-client": 20,
        "imbalance": 0.5,
        "heterogeneity": 0.5,
        "num-clients": 4,
        "local-lr": 0.001,
        "local-steps": 3,
        "batch-size": 5,
        "prior-precision": 1.0,
        "shared-noise": 0.5,
        "langevin-seed": 11,
    }
    return make_config({**defaults, **given})


def orders(grid: EngineGrid, problem: Problem) -> list[Message]:
    counts = [shard.num_examples for shard in problem.shards()]
    rule = (
        build_strategy(grid.config).local_rule(RoundContext(1, 0.001, torch.zeros(1))).sent.record()
    )
    messages = []
    for client, node in enumerate(grid.get_node_ids()):
        config = ConfigRecord(
            {
                "server-round": 7,
                "local-lr": 0.001,
                "client-id": client,
                "share": counts[client] / sum(counts),
                "total-examples": sum(counts),
                "shared-seed": 99,
            }
        )
        arrays = ArrayRecord(problem.state())
        content = RecordDict({"arrays": arrays, "config": config, "rule": rule})
        messages.append(Message(content, node, "train", group_id="7"))
    return messages


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 0, "shared_noise": 1.0},
        {"step_size": "decaying", "strong_convexity": 900.0, "shared_noise": 0.0},
        {"task": "digits", "dtype": "float32", "model": "mlp-32", "local_lr": 1e-5},
    ],
)
def test_the_engine_samples_as_the_client_app_does(options: dict[str, Any]) -> None:
    if options.get("task") == "digits":
        options = {"heterogeneity": 0.0, "imbalance": 0.0, **options}
    config = langevin_config(**options)
    problem = load_problem(config)
    grid = EngineGrid(config, problem)
    messages = orders(grid, problem)
    updates = []
    for client, (message, reply) in enumerate(
        zip(messages, grid.send_and_receive(messages), strict=True)
    ):
        node: dict[str, Any] = {"partition-id": client, "num-partitions": 4}
        context = Context(1, 1, node, RecordDict(), to_mapping(config))
        expected, found = (vector(r.content) for r in (app(message, context), reply))
        sent = vector(message.content)
        updates.append(expected - sent)
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(updates[-1])
    assert np.linalg.norm(updates[0] - updates[1]) > 0.01 * np.linalg.norm(updates[0])


def vector(content: RecordDict) -> np.ndarray:
    arrays = content.array_records["arrays"]
    return np.concatenate([a.numpy().astype(np.float64).reshape(-1) for a in arrays.values()])


def test_a_client_that_is_told_no_share_answers_with_an_error() -> None:
    config = langevin_config()
    problem = load_problem(config)
    message = orders(EngineGrid(config, problem), problem)[0]
    del message.content.config_records["config"]["share"]
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), to_mapping(config))
    with pytest.raises(ValueError, match="client 0 was told share = 0"):
        app(message, context)


@pytest.mark.parametrize("model", ["logistic", "mlp-8"])
def test_classifiers_descend_the_summed_negative_log_posterior(model: str, tmp_path: Path) -> None:
    """τ = 0, K = 1: Σ p_c θ_c = θ − η ∇(Σ over all examples of −ln p(y | x, θ) + ½λ‖θ‖²)."""
    eta, precision = 1e-4, 3.0
    config = make_config(
        {
            "algorithm": "fa-ld",
            "task": "digits",
            "model": model,
            "dtype": "float64",
            "partition": "dirichlet",
            "num-clients": 3,
            "num-server-rounds": 1,
            "local-steps": 1,
            "batch-size": 0,
            "local-lr": eta,
            "temperature": 0.0,
            "prior-precision": precision,
            "output-dir": str(tmp_path / "run"),
        }
    )
    problem = load_problem(config)
    shards = problem.shards()
    assert len({shard.num_examples for shard in shards}) == 3
    state = {name: value.clone().requires_grad_() for name, value in problem.state().items()}
    energy = torch.zeros((), dtype=torch.float64)
    for value in state.values():
        energy = energy + 0.5 * precision * value.square().sum()
    for shard in shards:
        x, y = shard.batch(np.random.default_rng(0), 0)
        logits = torch.func.functional_call(problem.model.module, state, (x.double(),))
        energy = energy - torch.log_softmax(logits, dim=1)[torch.arange(len(y)), y].sum()
    energy.backward()
    execute(PreparedRun(config, problem, tmp_path / "run"), EngineGrid(config, problem))
    found = load_file(tmp_path / "run" / "checkpoints" / "final.safetensors")
    for name, value in state.items():
        assert value.grad is not None
        expected = (value - eta * value.grad).detach().numpy()
        np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-12)
