"""Momentum at the clients: what is sent, who keeps it, and where it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from memory_grid import MemoryGrid, runs
from own_project import network, plain_sgd, project_app

from blackthorn.client_app import mod
from blackthorn.client_app.clientapp import app
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.evaluation import server_evaluation
from blackthorn.settings.config import RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import GFedAvg, Rage, RoundReport
from blackthorn.strategies.rounds import RoundContext
from blackthorn.tasks.problem import load_problem

# f = ½ (a x − b)² of the three clients.
CURVES = ((1.0, 4.0), (2.0, 1.0), (6.0, -1.0))
RATE, STEPS, BETA = 0.02, 3, 0.75


def config_of(rounds: int = 8, **more: Any) -> RunConfig:
    return make_config(
        {
            **{"task": "least-squares", "dtype": "float64", "num-clients": 3, "batch-size": 0},
            **{"local-steps": STEPS, "local-lr": RATE, "num-server-rounds": rounds},
            **{"initial-point": -5.0, "client-momentum": BETA},
            **{key.replace("_", "-"): value for key, value in more.items()},
        }
    )


def run(config: RunConfig, grid: Callable[[EngineGrid], Any] = lambda grid: grid) -> list[Any]:
    reports: list[RoundReport] = []
    problem = load_problem(config)
    build_strategy(config, [reports.append]).start(
        grid(EngineGrid(config, problem)),
        ArrayRecord(problem.state()),
        num_rounds=config.num_server_rounds,
        evaluate_fn=server_evaluation(problem),
    )
    return [report for report in reports if report.server_round]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"local_lr_decay": 0.8},
        {"participation": "fixed", "clients_per_round": 1, "seed": 3},
    ],
)
def test_a_run_is_the_plain_loop_whoever_is_drawn_at_whatever_rate(more: dict[str, Any]) -> None:
    reports = run(config_of(**more))
    momenta: dict[int, float] = {}
    w, rate = -5.0, RATE
    for report in reports:
        for client in report.invited:
            a, b = CURVES[client]
            end = b / a + (w - b / a) * (1 - rate * a * a) ** STEPS
            update = (w - end) / rate
            # The first update counts whole: afterwards who missed rounds goes on from its own.
            momenta[client] = BETA * momenta.get(client, update) + (1 - BETA) * update
        w -= rate * sum(momenta[client] for client in report.invited) / len(report.invited)
        rate *= more.get("local_lr_decay", 1.0)
        assert float(report.model[0]) == pytest.approx(w, rel=1e-9)
    if "seed" in more:
        assert len({tuple(report.invited) for report in reports}) > 1


def order(config: RunConfig, server_round: int, point: float) -> Message:
    rule = build_strategy(config).local_rule(RoundContext(1, RATE, torch.zeros(1))).sent.record()
    told = ConfigRecord({"server-round": server_round, "local-lr": RATE, "client-id": 0})
    state = {name: torch.full_like(v, point) for name, v in load_problem(config).state().items()}
    content = RecordDict({"arrays": ArrayRecord(state), "config": told, "rule": rule})
    return Message(content, 1000, "train")


def test_a_node_answers_as_the_engine_does_and_a_new_run_begins_anew() -> None:
    config = config_of()
    engine = EngineGrid(config, load_problem(config))
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 3}

    def sent(message: Message) -> float:
        (array,) = message.content.array_records["arrays"].values()
        return float(array.numpy().reshape(-1)[0])

    context = Context(1, 1000, node, RecordDict(), to_mapping(config))
    points = (-5.0, 2.0, 3.0)
    told = []
    for server_round, point in enumerate(points, start=1):
        message = order(config, server_round, point)
        (expected,) = engine.send_and_receive([message])
        told.append(sent(app(message, context)))
        assert told[-1] == pytest.approx(sent(expected), rel=1e-12)
    fresh = Context(2, 1000, node, RecordDict(), to_mapping(config))
    assert sent(app(order(config, 1, points[0]), fresh)) == pytest.approx(told[0], rel=1e-12)
    # What came before is in the last answer.
    assert abs(sent(app(order(config, 3, points[-1]), fresh)) - told[-1]) > 1e-3


def of_projects(beta: float, mods: list[Any], **options: Any) -> tuple[list[Any], RoundReport]:
    """The updates of three rounds of other people's ClientApps, and the last report."""
    reports: list[RoundReport] = []
    nodes = {
        10 + i: runs(project_app(i, prepare=plain_sgd, mods=mods, **options), **{"partition-id": i})
        for i in range(2)
    }
    strategy = GFedAvg(
        client_momentum=beta, local_rate=0.1, num_clients=2, observers=[reports.append]
    )
    strategy.start(MemoryGrid(nodes), ArrayRecord(network().state_dict()), num_rounds=3, timeout=60)
    return [report.updates for report in reports[-3:]], reports[-1]


def test_anybody_s_client_app_keeps_it_by_the_mod() -> None:
    (first, second, _), _ = of_projects(BETA, [mod])
    (plain, *_), _ = of_projects(0.0, [mod])
    torch.testing.assert_close(first, plain, rtol=1e-5, atol=1e-6)
    # The second round starts where it would have, too: (1 − β) of its own update, and β of before.
    (_, own, _), _ = of_projects(0.0, [mod])
    torch.testing.assert_close(second, BETA * first + (1 - BETA) * own, rtol=1e-4, atol=1e-5)


def test_a_client_that_does_not_attest_its_momentum_does_not_count() -> None:
    _, report = of_projects(BETA, [])
    assert report.accepted == []
    assert "attests nothing of the round's rule client-momentum" in report.rejected[0].reason


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"algorithm": "fat-clipping-pr", "clip_norm": 1.0},
            "client-momentum = 0.75 is not allowed with algorithm fat-clipping-pr.*: gfedavg, rage",
        ),
        (
            {
                **{"algorithm": "dp-fedavg", "clip_norm": 1.0, "noise_multiplier": 1.0},
                **{"participation": "poisson", "delta": 1e-3},
            },
            "client-momentum = 0.75 is not allowed with algorithm dp-fedavg",
        ),
        (
            {
                **{"task": "digits", "dtype": "float32", "local_dp_sgd": True, "batch_size": 8},
                **{"dp_sgd_sample_rate": 0.1, "initial_point": 1.0},
            },
            "client-momentum = 0.75 is not allowed with local-dp-sgd = true",
        ),
        ({"client_momentum": 1.0}, "client-momentum"),
    ],
)
def test_it_is_refused_in_one_line_where_it_would_not_be_what_it_is_called(
    more: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        config_of(**more)


def test_every_rule_takes_it() -> None:
    rules: tuple[dict[str, Any], ...] = (
        {"algorithm": "rage"},
        {"aggregator": "median"},
        {"aggregator": "mean"},
    )
    for more in rules:
        strategy = build_strategy(config_of(num_corrupt=0, **more))
        sent = strategy.local_rule(RoundContext(1, RATE, torch.zeros(1))).sent
        assert (sent.name, sent.numbers) == ("client-momentum", {"beta": BETA})
        assert strategy.needs_attestation
    assert not Rage(1).needs_attestation
    with pytest.raises(ValueError, match=r"client_momentum = 1\.5 is not allowed"):
        Rage(1, client_momentum=1.5)
