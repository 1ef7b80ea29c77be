"""What a client sends besides its model, under each claim: two data sets that differ in one example
must look alike wherever one is made, from the ClientApp as from the engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from policy_client import AT_CLIENTS, Client, run_config, train_message

from blackthorn.client_app import clientapp as client_app
from blackthorn.client_app.clientapp import app
from blackthorn.client_app.configured_rule import check_rule
from blackthorn.client_app.disclosure import UNTOLD, PublicRefusal, disclosed, disclosing
from blackthorn.client_app.messages import read_round
from blackthorn.client_app.node_data import load_node_client
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.evaluation import evaluation_of
from blackthorn.settings.config import ConfigError, RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import RoundContext
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.problem import Problem, load_problem
from blackthorn.tasks.shards import ExampleShard

OWN: dict[str, Any] = {"task": "own-data", "input-shape": "4", "num-classes": 2, "num-clients": 1}
SAMPLE: dict[str, Any] = {
    "local-dp-sgd": True,
    "dp-sgd-noise-multiplier": 20.0,
    "dp-sgd-sample-rate": 0.25,
    "batch-size": 8,
}
CLIENT: dict[str, Any] = {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 2.0}
CLAIMS: dict[str, dict[str, Any]] = {
    "sample": SAMPLE,
    "client": CLIENT,
    "both": {**CLIENT, **SAMPLE},
    "clips": {"algorithm": "ce-fedavg", "clip-norm": 1.0, "instruments": True, **SAMPLE},
}
NO_CLAIM: dict[str, dict[str, Any]] = {
    "no privacy": {},
    "seeded": {**SAMPLE, "insecure-seeded-noise": True},
    "not claimed": {**SAMPLE, "claim-privacy": False},
}
# A figure that rests on the noised model alone may differ from one draw of noise to the next.
OF_THE_NOISED_MODEL = ("update-norm",)


def data(folder: Path, n: int) -> str:
    """`n` examples; the 33rd is far from all others."""
    path = folder / f"{n}.npz"
    x = np.random.default_rng(0).random((n, 4))
    x[32:] = 100.0
    np.savez(path, x=x, y=np.arange(n) % 2)
    return str(path)


def told(replies: list[Message]) -> list[dict[str, Any]]:
    """Every record of the replies that is no model."""
    return [
        {f"{name}/{key}": value for key, value in record.items() if key not in OF_THE_NOISED_MODEL}
        for reply in replies
        for name, record in reply.content.items()
        if not isinstance(record, ArrayRecord)
    ]


def round_content(config: RunConfig, problem: Problem) -> RecordDict:
    """What the server sends in round 1."""
    rule = build_strategy(config).local_rule(RoundContext(1, config.local_lr, torch.zeros(1))).sent
    round_config = ConfigRecord({"server-round": 1, "local-lr": config.local_lr})
    arrays = ArrayRecord(problem.state())
    return RecordDict({"arrays": arrays, "config": round_config, "rule": rule.record()})


def everything_sent(config: RunConfig, path: str) -> list[Message]:
    """The ClientApp's replies to a question of each kind."""
    problem = load_problem(config)
    context = Context(1, 5, {"client-id": 0, "data-path": path}, RecordDict(), to_mapping(config))
    content = round_content(config, problem)
    replies = [app(Message(RecordDict(), 5, "query"), context)]
    replies.append(app(Message(content, 5, "train"), context))
    try:
        replies.append(app(Message(content, 5, "evaluate"), context))
    except ValueError as error:  # Flower sends its text
        problem_text = ConfigRecord({"problem": str(error)})
        replies.append(Message(RecordDict({"config": problem_text}), 5, "evaluate"))
    return replies


@pytest.mark.parametrize("claim", CLAIMS)
def test_under_a_claim_one_example_more_shows_in_nothing_that_is_said(
    tmp_path: Path, claim: str
) -> None:
    config = make_config({**OWN, **CLAIMS[claim]})
    few, more = (told(everything_sent(config, data(tmp_path, n))) for n in (32, 33))
    assert few == more


@pytest.mark.parametrize("case", NO_CLAIM)
def test_where_nothing_is_claimed_all_of_it_is_said(tmp_path: Path, case: str) -> None:
    config = make_config({**OWN, **NO_CLAIM[case]})
    replies = everything_sent(config, data(tmp_path, 33))
    enrolled, trained, evaluated = (reply.content.metric_records["metrics"] for reply in replies)
    assert enrolled["num-examples"] == trained["num-examples"] == 26
    assert isinstance(trained["train-loss"], float)
    assert evaluated["num-examples"] == 7
    assert "accuracy" in evaluated


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_engine_says_what_the_client_app_says(claim: str) -> None:
    config = make_config({"task": "digits", "num-clients": 3, **CLAIMS[claim]})
    problem = load_problem(config)
    few, more = (told(engine_replies(config, problem, n)) for n in (32, 33))
    assert few == more
    assert all("metrics/train-loss" not in records for records in few)


def engine_replies(config: RunConfig, problem: Problem, n: int) -> list[Message]:
    examples = Examples(torch.rand(n, 1, 8, 8), torch.arange(n) % 10)
    grid = EngineGrid(config, problem, [ExampleShard(examples)] * config.num_clients)
    content = round_content(config, problem)
    return [
        reply
        for kind in ("query", "train")
        for reply in grid.send_and_receive(
            [Message(content, node, kind) for node in grid.get_node_ids()]
        )
    ]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_figure_without_a_row_is_not_said(claim: str) -> None:
    config = make_config({**OWN, **CLAIMS[claim]})
    metrics = MetricRecord({"client-id": 3, "num-examples": 50, "largest-pixel": 0.7})
    told = ("attested", "rule", "notes")
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        "metrics": metrics,
        **{name: ConfigRecord({"name": "sgd"}) for name in told},
    }
    reply = disclosed(config, Message(RecordDict(records), 5, "train"))
    assert dict(reply.content.metric_records["metrics"]) == {"client-id": 3, "num-examples": 1}
    assert set(reply.content) == {"metrics", "attested"}


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_cannot_be_trained_on_is_not_told(tmp_path: Path, claim: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, x=np.zeros((3, 4)), y=[0, 1, 77])
    reply = enrolled(make_config({**OWN, **CLAIMS[claim]}), str(path))
    assert reply.content.config_records["config"]["problem"] == UNTOLD
    told_all = enrolled(make_config(OWN), str(path)).content.config_records["config"]["problem"]
    assert "y holds 77" in str(told_all)


def enrolled(config: RunConfig, path: str) -> Message:
    context = Context(1, 5, {"client-id": 0, "data-path": path}, RecordDict(), to_mapping(config))
    return app(Message(RecordDict(), 5, "query"), context)


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_goes_wrong_in_a_round_is_told_to_the_client_alone(
    tmp_path: Path,
    claim: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower sends the text of what a ClientApp raises."""

    def broken(*_: object) -> None:
        raise ArithmeticError("example 17 is 1e30")

    monkeypatch.setattr(client_app, "trained_norms", broken)
    path = data(tmp_path, 32)
    with pytest.raises(ValueError, match="only its own output says why") as raised:
        everything_sent(make_config({**OWN, **CLAIMS[claim]}), path)
    assert "17" not in str(raised.value)
    assert "example 17 is 1e30" in caplog.text
    with pytest.raises(ArithmeticError, match="example 17"):
        everything_sent(make_config(OWN), path)


@pytest.mark.parametrize("claim", CLAIMS)
def test_an_error_that_an_app_answers_with_is_told_as_what_it_raises(claim: str) -> None:
    def fails(message: Message, _: Context) -> Message:
        return Message(Error(17, "example 17 is 1e30"), reply_to=message)

    def answered(config: RunConfig) -> Message:
        context = Context(1, 5, {}, RecordDict(), to_mapping(config))
        return disclosing(Message(RecordDict(), 5, "train"), context, fails)

    with pytest.raises(ValueError, match="only its own output says why") as raised:
        answered(make_config({**OWN, **CLAIMS[claim]}))
    assert "17" not in str(raised.value)
    assert answered(make_config(OWN)).error.reason == "example 17 is 1e30"


def test_a_refusal_of_the_request_is_told_under_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PublicRefusal("the server asks for too little noise")

    monkeypatch.setattr(client_app, "noised_models", refuses)
    with pytest.raises(PublicRefusal, match="too little noise"):
        everything_sent(make_config({**OWN, **SAMPLE}), data(tmp_path, 32))


def test_a_path_is_never_told(tmp_path: Path) -> None:
    missing = str(tmp_path / "secret place" / "a.npz")
    config = make_config(OWN)
    context = Context(
        1, 5, {"client-id": 0, "data-path": missing}, RecordDict(), to_mapping(config)
    )
    content = RecordDict({"config": ConfigRecord({"server-round": 1}), "arrays": ArrayRecord()})
    with pytest.raises(ValueError, match=r"a\.npz") as raised:
        app(Message(content, 5, "train"), context)
    assert "secret place" not in str(raised.value)


@pytest.mark.parametrize("claim", CLAIMS)
def test_nothing_is_held_out_for_what_may_not_be_said(tmp_path: Path, claim: str) -> None:
    """A random split of n examples is another one of n + 1: all of training would move."""
    node: dict[str, Any] = {"client-id": 0, "data-path": data(tmp_path, 33)}
    client = load_node_client(make_config({**OWN, **CLAIMS[claim]}), node)
    assert client.held_out is None
    assert client.shard.num_examples == 33
    assert load_node_client(make_config(OWN), node).shard.num_examples == 26


def test_nobody_is_asked_for_what_may_not_be_said() -> None:
    config = make_config({**OWN, **SAMPLE})
    evaluate = evaluation_of(config, load_problem(config))
    assert evaluate is not None
    assert evaluate(1, ArrayRecord()) is None
    assert evaluation_of(make_config(OWN), load_problem(config)) is None
    assert build_strategy(make_config({**OWN, **CLIENT})).confidential


def test_weights_by_counts_are_refused_where_counts_are_not_told() -> None:
    with pytest.raises(ConfigError, match="breaks the claim of local-dp-sgd") as raised:
        make_config({**SAMPLE, "weighting": "num-examples"})
    assert "\n" not in str(raised.value)
    make_config({**SAMPLE, "weighting": "num-examples", "claim-privacy": False})


@pytest.mark.parametrize(
    "values",
    [
        {**AT_CLIENTS, "claim-privacy": False},
        {**AT_CLIENTS, "insecure-seeded-noise": True},
        {**AT_CLIENTS, "algorithm": "fat-clipping-pr", "epsilon": 0.0, "noise-location": "server"},
        SAMPLE,
    ],
)
def test_a_server_that_claims_more_than_the_client_s_configuration_is_told_nothing(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    client, config = Client(tmp_path, ledger=False), run_config({**values, "model": "logistic"})
    for kind in ("query", "train"):
        message = Message(train_message(config, 1).content, 5, kind)
        message.content.config_records["config"]["claim"] = "client"
        if kind == "query":
            content = client.send(config, message).content
            assert set(content.metric_records["metrics"]) == {"client-id"}
            said = str(content.config_records["config"]["problem"])
        else:
            with pytest.raises(PublicRefusal) as refused:
                client.send(config, message)
            said = str(refused.value)
        assert "the server claims the clients' privacy, and this client's run" in said
        with pytest.raises(PublicRefusal, match="the server claims the clients' privacy"):
            check_rule(config, replace(read_round(message), claimed=True))
