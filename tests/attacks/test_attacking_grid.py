"""AttackingGrid over a grid in memory: whose replies change, and to what."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid

from blackthorn import attacks
from blackthorn.attacks import AttackingGrid, fixed_corrupt, redrawn_corrupt
from blackthorn.flower_port.synchronous import SynchronousGrid
from blackthorn.server_app.build import server_rule
from blackthorn.settings.config import make_config

LOCAL_LR = 0.25
SEED = 11
ROUND = 3
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([1.0, -1.0], dtype=np.float32)


def gradient(client_id: int) -> np.ndarray:
    """What client `client_id` honestly sends, [8]: multiples of 1/8, exact in float32."""
    return (np.arange(8) - client_id * np.array([1, 2, 3, 4, 5, 6, 7, 8]) / 8).astype(np.float32)


def model_record() -> ArrayRecord:
    return ArrayRecord(
        {"weight": Array(WEIGHT), "steps": Array(np.array([0])), "bias": Array(BIAS)}
    )


def trained_record(client_id: int) -> ArrayRecord:
    step = LOCAL_LR * gradient(client_id)
    return ArrayRecord(
        {
            "weight": Array(WEIGHT - step[:6].reshape(2, 3)),
            "steps": Array(np.array([client_id])),
            "bias": Array(BIAS - step[6:]),
        }
    )


class HonestGrid(MemoryGrid):
    """Node 100 + i is client i, answers at once, in reverse order, and may fail."""

    def __init__(self, failing: Iterable[int] = (), silent: Iterable[int] = ()) -> None:
        super().__init__({})
        self.failing, self.silent = set(failing), set(silent)
        self.timeout: float | None = None
        self.set_run("a run")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        self.sent, self.timeout = list(messages), timeout
        clients = [(message.metadata.dst_node_id - 100, message) for message in self.sent]
        return [self.answer(i, m) for i, m in reversed(clients) if i not in self.silent]

    def answer(self, client_id: int, message: Message) -> Message:
        if client_id in self.failing:
            error = Message(Error(5, "gone"), reply_to=message)
            error.metadata.__dict__["_src_node_id"] = 1  # as a SuperLink does
            return error
        content = RecordDict(
            {
                "arrays": trained_record(client_id),
                "metrics": MetricRecord({"num-examples": 10 + client_id}),
            }
        )
        return Message(content, reply_to=message)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [f"pushed {message.metadata.dst_node_id}" for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [Message(RecordDict(), 0, "query") for _ in message_ids]

    def get_node_ids(self) -> list[int]:
        return [100, 101]


def order(client_id: int, kind: str = "train", with_ids: bool = True) -> Message:
    config = ConfigRecord({"server-round": ROUND, "client-id": client_id, "local-lr": LOCAL_LR})
    content = RecordDict({"arrays": model_record(), "config": config})
    message = Message(content, 100 + client_id, kind)
    if with_ids:
        message.metadata.__dict__["_message_id"] = f"order for {client_id}"
    return message


def updates(replies: Iterable[Message]) -> dict[int, np.ndarray]:
    """Client id -> u [8], decoded here by hand."""
    decoded = {}
    for reply in replies:
        arrays = reply.content.array_records["arrays"]
        weight, bias = arrays["weight"].numpy(), arrays["bias"].numpy()
        local = np.concatenate([(WEIGHT - weight).ravel(), BIAS - bias])
        decoded[reply.metadata.src_node_id - 100] = local / LOCAL_LR
    return decoded


def shared_generator(server_round: int = ROUND) -> np.random.Generator:
    sequence = np.random.SeedSequence(SEED, spawn_key=(15, server_round, 0))
    return np.random.Generator(np.random.Philox(sequence))


def attacked(
    name: str, cohort: Iterable[int] = range(6), inner: HonestGrid | None = None, **options: Any
) -> list[Message]:
    """The replies of a round of `cohort`, of which clients 4 and 5 are corrupt."""
    rule_at = server_rule(make_config({"num-clients": 6}))
    grid = AttackingGrid(
        inner or HonestGrid(), name, fixed_corrupt(6, 2), SEED, rule_at=rule_at, **options
    )
    return grid.send_and_receive([order(i) for i in cohort])


@pytest.mark.parametrize("with_ids", [True, False])
def test_corrupt_replies_are_the_attack_on_all_colluders_and_others_stay(with_ids: bool) -> None:
    grid = AttackingGrid(HonestGrid(), "reverse-scaled-average", fixed_corrupt(6, 2), SEED)
    replies = grid.send_and_receive([order(i, with_ids=with_ids) for i in range(6)])
    sent = updates(replies)
    assert list(sent) == [5, 4, 3, 2, 1, 0]
    expected = -50 * (gradient(4) + gradient(5)) / 2
    for client in range(6):
        honest = gradient(client)
        np.testing.assert_allclose(sent[client], expected if client >= 4 else honest, rtol=1e-5)
    for reply in replies:
        client = reply.metadata.src_node_id - 100
        assert reply.content["metrics"] == MetricRecord({"num-examples": 10 + client})
        arrays = reply.content.array_records["arrays"]
        assert list(arrays) == ["weight", "steps", "bias"]
        assert arrays["steps"].numpy().tolist() == [client]
        assert arrays["weight"].numpy().dtype == np.float32


def test_the_attack_is_told_how_many_replied_and_the_round_s_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def spy(own: torch.Tensor, **arguments: Any) -> torch.Tensor:
        calls.append((own, arguments))
        return own

    monkeypatch.setattr(
        "blackthorn.attacks.simulated.get", lambda name: attacks.VectorAttack(name, spy)
    )
    inner = HonestGrid(failing=[0], silent=[1])
    attacked("spy", cohort=[0, 1, 2, 3, 5, 4], inner=inner)
    attacked("spy", cohort=[0, 1, 2, 3, 5], inner=inner, omniscient=True)
    (own, plain), (partial, omniscient) = calls
    np.testing.assert_array_equal(own.numpy(), [gradient(4), gradient(5)])  # by client id
    assert own.dtype == torch.float32
    assert (plain["num_clients"], plain["honest"]) == (4, None)
    expected = shared_generator().standard_normal(5)
    np.testing.assert_array_equal(plain["generator"].standard_normal(5), expected)
    np.testing.assert_array_equal(partial.numpy(), [gradient(5)])
    assert omniscient["num_clients"] == 3
    np.testing.assert_array_equal(omniscient["honest"].numpy(), [gradient(2), gradient(3)])


def test_the_shift_is_shared_and_differs_between_rounds() -> None:
    sent = updates(attacked("gradient-shift"))
    shift = 50 * shared_generator().standard_normal(8)
    for client in (4, 5):
        np.testing.assert_allclose(sent[client], gradient(client) + shift, rtol=1e-4, atol=1e-4)
    assert not np.allclose(shift, 50 * shared_generator(ROUND + 1).standard_normal(8))


def test_without_collusion_each_reverses_its_own() -> None:
    sent = updates(attacked("reverse-average", collusion=False))
    for client in (4, 5):
        np.testing.assert_allclose(sent[client], -gradient(client), rtol=1e-6)


@pytest.mark.parametrize("cohort", [range(6), [0, 5]], ids=["all", "few"])
@pytest.mark.parametrize("name", attacks.names("vector"))
def test_without_collusion_a_lie_is_the_lone_program_s_whoever_else_is_there(
    name: str, cohort: list[int]
) -> None:
    """As in a cluster, where a Byzantine node knows its own update and the configuration alone:
    no other client's data, nor its absence, moves the lie."""
    inner = HonestGrid()
    message = order(5)
    message.content.config_records["config"]["seed"] = SEED
    program = attacks.byzantine_app(ClientApp(), name)
    program._honest_app = lambda message, _: inner.answer(5, message)  # type: ignore[assignment]
    context = Context(1, 105, {}, RecordDict(), {"num-clients": 6})
    alone = updates([program(message, context)])
    sent = updates(attacked(name, cohort, collusion=False, expected_cohort=6))
    np.testing.assert_array_equal(sent[5], alone[5])


def test_without_collusion_nobody_knows_a_deviation() -> None:
    sent = updates(attacked("baruch", collusion=False, expected_cohort=6))
    for client in (4, 5):
        np.testing.assert_allclose(sent[client], gradient(client), rtol=1e-6)


def test_a_cohort_without_corrupt_clients_is_left_alone() -> None:
    sent = updates(attacked("reverse-scaled-average", cohort=[0, 1, 2]))
    for client in (0, 1, 2):
        np.testing.assert_array_equal(sent[client], gradient(client))


def test_a_corrupt_client_that_fails_cannot_lie() -> None:
    replies = attacked("all-ones", inner=HonestGrid(failing=[4]))
    errors = [reply for reply in replies if reply.has_error()]
    assert [error.metadata.reply_to_message_id for error in errors] == ["order for 4"]
    sent = updates(reply for reply in replies if reply.has_content())
    np.testing.assert_array_equal(sent[5], np.ones(8))
    np.testing.assert_array_equal(sent[3], gradient(3))


def test_a_reply_attack_changes_corrupt_replies_only() -> None:
    replies = attacked("nan")
    sent = updates(replies)
    assert all(np.isnan(sent[client]).all() for client in (4, 5))
    assert not any(np.isnan(sent[client]).any() for client in range(4))


@pytest.mark.parametrize("name", ["slow", "exit"])
def test_the_silenced_are_missing(name: str) -> None:
    assert list(updates(attacked(name))) == [3, 2, 1, 0]


def test_a_client_that_raises_answers_with_flower_s_error() -> None:
    errors = [reply for reply in attacked("raise") if reply.has_error()]
    assert [error.metadata.src_node_id for error in errors] == [105, 104]
    assert [error.metadata.reply_to_message_id for error in errors] == [
        "order for 5",
        "order for 4",
    ]
    assert {error.error.code for error in errors} == {2}


def test_label_flip_is_written_into_the_corrupt_clients_orders() -> None:
    inner = HonestGrid()
    sent = updates(attacked("label-flip", inner=inner))
    poisons = [message.content["config"].get("poison") for message in inner.sent]
    assert poisons == [None] * 4 + ["label-flip"] * 2
    np.testing.assert_array_equal(sent[5], gradient(5))  # the inner grid's answer is kept


def test_messages_of_other_types_pass_through() -> None:
    grid = AttackingGrid(HonestGrid(), "nan", fixed_corrupt(6, 6), SEED)
    for kind in ("evaluate", "query"):
        sent = updates(grid.send_and_receive([order(5, kind)], timeout=4.0))
        np.testing.assert_array_equal(sent[5], gradient(5))
    sent = updates(grid.send_and_receive([order(5, "train.again")]))
    assert np.isnan(sent[5]).all()
    assert grid.send_and_receive([]) == []


def test_everything_else_is_the_inner_grid_s() -> None:
    inner = HonestGrid()
    grid = AttackingGrid(inner, "nan", fixed_corrupt(6, 2), SEED)
    grid.send_and_receive([order(0)], timeout=7.5)
    assert inner.timeout == 7.5
    assert grid.get_node_ids() == [100, 101]
    assert grid.run == "a run"
    grid.set_run("another run")
    assert inner.run == "another run"
    assert grid.push_messages([order(1, "query")]) == ["pushed 101"]
    assert len(list(grid.pull_messages(["a", "b"]))) == 2
    made = grid.create_message(RecordDict(), "query", 101, "group", 9.0)
    assert (made.metadata.dst_node_id, made.metadata.ttl) == (101, 9.0)


def test_train_messages_cannot_slip_past_the_attack() -> None:
    grid = AttackingGrid(HonestGrid(), "nan", fixed_corrupt(6, 2), SEED)
    # So that strategies ask for the round in one call.
    assert isinstance(grid, SynchronousGrid)
    with pytest.raises(ValueError, match="send_and_receive"):
        grid.push_messages([order(5)])


@pytest.mark.parametrize("key", ["server-round", "client-id", "local-lr"])
def test_an_order_without_what_the_attack_needs_is_refused(key: str) -> None:
    message = order(0)
    del message.content["config"][key]
    grid = AttackingGrid(HonestGrid(), "nan", fixed_corrupt(6, 2), SEED)
    with pytest.raises(ValueError, match=f"needs a number under '{key}'"):
        grid.send_and_receive([message])


def test_the_learning_rate_may_have_another_key() -> None:
    message = order(5)
    config = message.content.config_records["config"]
    config["lr"] = config.pop("local-lr")
    grid = AttackingGrid(HonestGrid(), "sign-flip", fixed_corrupt(6, 2), SEED, local_lr_key="lr")
    sent = updates(grid.send_and_receive([message]))
    np.testing.assert_allclose(sent[5], -gradient(5), rtol=1e-6)


def test_a_reply_that_is_no_model_is_named() -> None:
    class Strange(HonestGrid):
        def answer(self, client_id: int, message: Message) -> Message:
            reply = super().answer(client_id, message)
            del reply.content.array_records["arrays"]["bias"]
            return reply

    with pytest.raises(ValueError, match="lacks 'bias'"):
        attacked("all-ones", inner=Strange())


def test_fixed_corrupt_are_the_last() -> None:
    corrupt = fixed_corrupt(10, 3)
    assert corrupt(1) == corrupt(2) == {7, 8, 9}
    corrupt(1).clear()
    assert corrupt(1) == {7, 8, 9}
    assert fixed_corrupt(10, 0)(1) == set()


def test_redrawn_corrupt_are_uniform_and_reproducible() -> None:
    corrupt = redrawn_corrupt(10, 3, seed=1)
    rounds = [corrupt(server_round) for server_round in range(1, 1001)]
    assert all(len(drawn) == 3 and drawn <= set(range(10)) for drawn in rounds)
    assert rounds[4] == redrawn_corrupt(10, 3, seed=1)(5)
    assert rounds[:50] != [redrawn_corrupt(10, 3, seed=2)(t) for t in range(1, 51)]
    # Each id is drawn 300 times, standard deviation 14.5.
    for client in range(10):
        assert abs(sum(client in drawn for drawn in rounds) - 300) < 75


@pytest.mark.parametrize("num_byzantine", [-1, 11])
def test_more_corrupt_clients_than_there_are_are_refused(num_byzantine: int) -> None:
    with pytest.raises(ValueError, match=f"num_byzantine is {num_byzantine}"):
        fixed_corrupt(10, num_byzantine)
    with pytest.raises(ValueError, match=f"num_byzantine is {num_byzantine}"):
        redrawn_corrupt(10, num_byzantine, seed=0)
