"""Clipping with error feedback: where it ends, its memories, and who has lost what."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from blackthorn.client_app.clientapp import app
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.evaluation import server_evaluation
from blackthorn.settings.config import RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import ErrorFeedback, RoundReport
from blackthorn.strategies.attestation import SentRule
from blackthorn.strategies.local_rule import ClientRound, rule_of
from blackthorn.strategies.rounds import RoundContext
from blackthorn.tasks.problem import load_problem

# Zhang et al., Table 4: f = ½ (a x − b)² of the three clients, whose minima are b / a.
CURVES = ((1.0, 4.0), (2.0, 1.0), (6.0, -1.0))
UNCLIPPED = sum(b / a for a, b in CURVES) / 3  # 13/9: Q = ∞, where each arrives at its minimum
BOUND, STEPS, RATE = 1.0, 400, 0.05


def config_of(start: float, rounds: int, **more: Any) -> RunConfig:
    return make_config(
        {
            **{"algorithm": "error-feedback", "task": "least-squares", "dtype": "float64"},
            **{"clip-norm": BOUND, "clip-units": "parameter", "num-clients": 3, "batch-size": 0},
            **{"local-steps": STEPS, "local-lr": RATE, "num-server-rounds": rounds},
            **{"initial-point": start, **{key.replace("_", "-"): v for key, v in more.items()}},
        }
    )


def run(config: RunConfig, state: Any = None, rounds: int | None = None) -> tuple[Any, list[Any]]:
    """The strategy after its rounds, and their reports."""
    reports: list[RoundReport] = []
    problem = load_problem(config)
    strategy = build_strategy(config, [reports.append])
    strategy.start(
        EngineGrid(config, problem),
        ArrayRecord(problem.state()),
        num_rounds=rounds or config.num_server_rounds,
        evaluate_fn=server_evaluation(problem),
        from_state=state,
    )
    return strategy, [report for report in reports if report.server_round]


# The plain recursion is within 1e-7 of where it ends after 23 rounds from any of these.
STARTS = (-5.0, 0.6, 5.0)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("options", ["", "smooth = true"])
def test_clipping_does_not_move_the_stationary_point(start: float, options: str) -> None:
    _, reports = run(config_of(start, 24, algorithm_options=options))
    assert float(reports[-1].model[0]) == pytest.approx(UNCLIPPED, abs=1e-6)


@pytest.mark.parametrize("start", STARTS)
def test_without_memories_the_same_threshold_moves_it(start: float) -> None:
    _, biased = run(config_of(start, 24, algorithm="ce-fedavg"))
    assert float(biased[-1].model[0]) == pytest.approx(2 / 3, abs=1e-6)


def test_in_gradient_units_with_one_step_it_ends_at_the_sum_s_minimum() -> None:
    """The plain recursion is within 1e-7 of it after 118 rounds."""
    more = {"clip_units": "gradient", "local_steps": 1, "local_lr": 0.02}
    _, reports = run(config_of(5.0, 120, **more))
    assert float(reports[-1].model[0]) == pytest.approx(0.0, abs=1e-6)


def clipped(x: float) -> float:
    return max(-BOUND, min(BOUND, x))


@pytest.mark.parametrize("participation", [{}, {"participation": "fixed", "clients_per_round": 1}])
def test_a_run_is_the_plain_loop_whoever_is_drawn(participation: dict[str, Any]) -> None:
    rounds = 25
    _, reports = run(config_of(-5.0, rounds, **participation))
    w, memories = -5.0, [0.0, 0.0, 0.0]
    for report in reports:
        for client in report.invited:
            a, b = CURVES[client]
            # K steps of gradient descent on a quadratic, in closed form.
            end = b / a + (w - b / a) * (1 - RATE * a * a) ** STEPS
            memories[client] += clipped((w - end) - memories[client])
        w -= sum(memories) / 3
        assert float(report.model[0]) == pytest.approx(w, rel=1e-9)
    assert len({tuple(report.invited) for report in reports}) == (3 if participation else 1)


def test_a_client_that_knows_nothing_of_memories_moves_its_own_no_farther() -> None:
    strategy = ErrorFeedback(1.0, num_clients=2)
    context = RoundContext(1, 0.5, torch.zeros(2), population=(4, 7, 9), accepted=(4, 7))
    updates = torch.tensor([[30.0, 40.0], [0.3, 0.4]])
    for expected in ([0.6, 0.8], [1.2, 1.6], [1.8, 2.4]):
        vector = strategy.combine(updates, torch.ones(2) / 2, context).vector
        # The mean over all three who have enrolled, of whom one has never answered.
        mean = [(expected[0] + 0.3) / 3, (expected[1] + 0.4) / 3]
        assert vector.tolist() == pytest.approx(mean, rel=1e-6)


def test_an_update_that_overflows_beside_a_memory_leaves_it_as_it_was() -> None:
    strategy = ErrorFeedback(1.0, num_clients=2)
    context = RoundContext(1, 1.0, torch.zeros(1), population=(0,), accepted=(0,))
    strategy.combine(torch.tensor([[-5.0]]), torch.ones(1), context)
    strategy.restore_own({"0": np.array([-3e38], dtype=np.float32)})
    vector = strategy.combine(torch.tensor([[3e38]]), torch.ones(1), context).vector
    assert vector.tolist() == pytest.approx([-3e38])


@pytest.mark.parametrize("participation", [{}, {"participation": "poisson", "sample_rate": 0.5}])
def test_a_resumed_run_has_the_memories_that_it_left(participation: dict[str, Any]) -> None:
    config = config_of(-5.0, 12, local_lr_decay=0.9, **participation)
    _, whole = run(config)
    first, _ = run(config, rounds=6)
    _, rest = run(config, state=first.state())
    # To rounding: how a product is added up hangs on where in memory its numbers lie.
    expected = [float(r.model[0]) for r in whole[6:]]
    assert [float(r.model[0]) for r in rest] == pytest.approx(expected, rel=1e-12)


def test_in_what_order_memories_were_read_changes_no_bit_of_the_model() -> None:
    strategy = ErrorFeedback(1.0, num_clients=12)
    model = torch.zeros(1, dtype=torch.float64)
    context = RoundContext(1, RATE, model, population=(0,), accepted=(0,))
    memories = {str(client): np.array([0.1 * 3.7**client]) for client in range(12)}
    vectors = []
    for names in (sorted(memories, key=int), sorted(memories), sorted(memories, reverse=True)):
        strategy.restore_own({name: memories[name] for name in names})
        update = torch.zeros((1, 1), dtype=torch.float64)
        vectors.append(float(strategy.combine(update, torch.ones(1), context).vector))
    assert len(set(vectors)) == 1


def order(config: RunConfig, memory: np.ndarray | None) -> Message:
    problem = load_problem(config)
    context = RoundContext(1, RATE, torch.zeros(1))
    rule = build_strategy(config).local_rule(context).sent.record()
    told = ConfigRecord({"server-round": 1, "local-lr": RATE, "client-id": 0})
    content = RecordDict({"arrays": ArrayRecord(problem.state()), "config": told, "rule": rule})
    if memory is not None:
        content["memory"] = ArrayRecord({"memory": Array(memory)})
    return Message(content, 1000, "train")


def answered(config: RunConfig, message: Message) -> np.ndarray:
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 3}
    reply = app(message, Context(1, 1000, node, RecordDict(), to_mapping(config)))
    (array,) = reply.content.array_records["arrays"].values()
    return array.numpy().reshape(-1)


@pytest.mark.parametrize("options", ["", "smooth = true"])
def test_a_client_sends_its_memory_and_what_it_is_off_by_clipped(options: str) -> None:
    config = config_of(-5.0, 1, algorithm_options=options)
    memory = np.array([-3.0]) / RATE  # in gradient units, as all lengths that travel
    message = order(config, memory)
    (engine,) = EngineGrid(config, load_problem(config)).send_and_receive([message])
    (array,) = engine.content.array_records["arrays"].values()
    # w − w_i = −9 from −5 to the minimum at 4, of which −3 is known.
    off = -6.0 / 37**0.5 if options else -1.0
    assert answered(config, message) == pytest.approx([-5.0 - (-3.0 + off)], rel=1e-9)
    np.testing.assert_allclose(array.numpy().reshape(-1), answered(config, message), rtol=1e-12)


@pytest.mark.parametrize("memory", [None, np.zeros(2)])
def test_a_client_that_was_sent_no_memory_of_its_model_s_size_does_not_answer(memory: Any) -> None:
    config = config_of(-5.0, 1)
    with pytest.raises(ValueError, match="the server sent no memory of the model's size"):
        answered(config, order(config, memory))


def test_the_rule_is_carried_out_by_what_is_sent_alone() -> None:
    rule = rule_of(SentRule("clip-difference", {"bound": 2.0}))
    memory = torch.tensor([1.0, 0.0])
    round_of = ClientRound(0, 1, {}, memory, np.random.default_rng, lambda: None)  # type: ignore[arg-type, return-value]
    start, trained = torch.zeros(2), torch.tensor([[-0.5 * 7, 0.0]])
    sent = rule.on_update(start, trained, 0.5, lambda _: round_of)
    assert sent.tolist() == [[-0.5 * 3, 0.0]]


def test_memories_belong_to_ids_not_to_nodes() -> None:
    with pytest.raises(ValueError, match="identity = 'node' is not allowed"):
        ErrorFeedback(1.0, identity="node")
    with pytest.raises(ValueError, match="weighting = num-examples is not allowed with algorithm"):
        make_config({"algorithm": "error-feedback", "clip-norm": 1.0, "weighting": "num-examples"})
    with pytest.raises(ValueError, match="aggregator = median"):
        make_config({"algorithm": "error-feedback", "clip-norm": 1.0, "aggregator": "median"})


def test_a_second_run_of_the_same_strategy_begins_without_memories() -> None:
    strategy = ErrorFeedback(1.0, num_clients=2)
    context = RoundContext(1, 1.0, torch.zeros(1), population=(0,), accepted=(0,))
    strategy.combine(torch.tensor([[-5.0]]), torch.ones(1), context)
    strategy.on_enrolment([])
    vector = strategy.combine(torch.tensor([[5.0]]), torch.ones(1), context).vector
    assert vector.tolist() == [1.0]
