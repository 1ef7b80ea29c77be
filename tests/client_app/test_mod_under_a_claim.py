"""Under a client-level claim the mod sends the noised model and nothing that the app's examples
decide, whatever the app answers with."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid, runs
from torch import nn

from blackthorn.client_app import Round, mod
from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    FatClippingPR,
    FederatedStrategy,
    FullParticipation,
    PrivacyPlan,
    RoundReport,
)

Train = Callable[[Message], Message]
SECRET = "row 17 of patient 4711"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight


def network() -> nn.Module:
    """Two layers of one shape, each a parameter of its own."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def private(location: Any = "client") -> FederatedStrategy:
    plan = PrivacyPlan(
        ClipNorm(1.0), 2.0, 1, 1, FullParticipation(), delta=0.01, noise_location=location
    )
    return DPFedAvg(plan, local_rate=1.0)


def one_round(
    strategy: FederatedStrategy, train: Train, start: Any, mods: Sequence[Any] = (mod,)
) -> tuple[list[Message], RoundReport]:
    """What the one client answers, and the round's report."""
    app, replies, reports = ClientApp(mods=list(mods)), list[Message](), list[RoundReport]()
    app.train()(lambda message, context: train(message))  # noqa: ARG005
    inner = runs(app, **{"partition-id": 0})

    def answer(message: Message) -> Message | None:
        reply = inner(message)
        assert reply is not None
        replies.append(reply)
        return reply

    strategy._observers.append(reports.append)
    strategy.start(MemoryGrid({10: answer}), start, num_rounds=1, timeout=60)
    return replies, reports[0]


@pytest.mark.parametrize("location", ["server", "client"])
@pytest.mark.parametrize("part", ["load", "optimizer", "wrap", "reply"])
def test_without_the_mod_a_round_does_nothing_under_a_claim(location: Any, part: str) -> None:
    """It is refused before an example is looked at: what the training raises would be told."""

    def train(message: Message) -> Message:
        round_, net = Round.of(message), network()
        if part == "reply":
            return round_.reply(net)
        given = torch.optim.SGD(net.parameters(), 1.0) if part == "wrap" else net
        getattr(round_, part)(given)
        raise ValueError(SECRET)

    (reply,), report = one_round(private(location), train, network(), mods=())
    assert SECRET not in str(reply.error.reason)
    assert "add mods=[blackthorn.client_app.mod] to its ClientApp" in str(reply.error.reason)
    assert report.accepted == []


def moved_to(value: float) -> Train:
    """Every parameter ends at one number, as of training that overflowed."""

    def train(message: Message) -> Message:
        sent = message.content.array_records["arrays"]
        arrays = {k: Array(np.full(v.shape, value, np.float32)) for k, v in sent.items()}
        metrics = MetricRecord({"num-examples": 7, "train-loss": value})
        return Message(
            RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message
        )

    return train


def said(reply: Message) -> dict[str, Any]:
    assert reply.has_content()
    records = reply.content
    assert set(records) == {"arrays", "metrics", "attested"}
    return {name: dict(records[name]) for name in ("metrics", "attested")} | {
        name: array.shape for name, array in records.array_records["arrays"].items()
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_trained_values_decide_nothing_but_the_noised_numbers(value: float) -> None:
    (usual,), _ = one_round(private(), lambda m: Round.of(m).reply(network()), network())
    (reply,), report = one_round(private(), moved_to(value), network())
    assert report.accepted == [10]
    assert said(reply) == said(usual)
    sent = [array.numpy() for array in reply.content.array_records["arrays"].values()]
    assert all(np.isfinite(one).all() for one in sent)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_without_a_claim_values_that_are_not_finite_are_not_taken_for_a_tie(value: float) -> None:
    strategy = FatClippingPR(1.0, local_rate=1.0, num_clients=1)
    _, report = one_round(strategy, moved_to(value), network())
    told = [rejection.reason for rejection in report.rejected]
    assert not any("one parameter" in reason for reason in told)


def test_a_tie_of_the_module_is_told_under_a_claim() -> None:
    def train(message: Message) -> Message:
        return Round.of(message).reply(Tied())

    start = ArrayRecord(Tied().state_dict())
    (reply,), _ = one_round(private(), train, start)
    assert "'two.weight' and 'one.weight' are one parameter" in str(reply.error.reason)
    module = Tied()
    (reply,), report = one_round(private(), train, module)
    assert report.accepted == [10]
    second = reply.content.array_records["arrays"]["two.weight"].numpy()
    np.testing.assert_array_equal(second, module.two.weight.detach().numpy())


def test_layers_that_were_copied_are_two_parameters() -> None:
    """As those of torch.nn.TransformerEncoder are: equal at the start."""
    copied = network()
    copied[2].load_state_dict(copied[0].state_dict())  # type: ignore[index]
    for strategy in (private(), FatClippingPR(1.0, local_rate=1.0, num_clients=1)):
        _, report = one_round(strategy, lambda m: Round.of(m).reply(copied), copied)
        assert report.accepted == [10]


def fails(message: Message) -> Message:
    return Message(Error(5000 + 17, SECRET), reply_to=message)


def wrong_shape(message: Message) -> Message:
    return Message(RecordDict({"a": ArrayRecord(), "b": ArrayRecord()}), reply_to=message)


def raises(message: Message) -> Message:
    del message
    raise ValueError(SECRET)


@pytest.mark.parametrize("location", ["client", "server"])
@pytest.mark.parametrize("train", [fails, wrong_shape])
def test_whatever_fails_is_told_as_an_exception_is(train: Train, location: str) -> None:
    (failed,), _ = one_round(private(location), raises, network())
    (reply,), _ = one_round(private(location), train, network())
    assert SECRET not in str(failed.error.reason)
    assert (reply.error.code, reply.error.reason) == (failed.error.code, failed.error.reason)


def test_without_a_claim_an_app_s_own_error_is_told() -> None:
    strategy = FatClippingPR(1.0, local_rate=1.0, num_clients=1)
    (reply, *_), _ = one_round(strategy, fails, network())
    assert (reply.error.code, reply.error.reason) == (5017, SECRET)


@pytest.mark.parametrize("location", ["client", "server"])
def test_what_an_app_adds_to_its_round_s_reply_stays_here(location: str) -> None:
    def adds(message: Message) -> Message:
        reply = Round.of(message).reply(network(), {"train-loss": 1.5}, 77)
        counts = Array(np.array([3.0, 4.0]))
        reply.content["per-class"] = ArrayRecord({"counts": counts})
        reply.content.array_records["arrays"]["counts"] = counts
        reply.content["metrics"] = MetricRecord({"client-id": 0.123, "sample-epsilon": 0.456})
        reply.content["patients"] = ConfigRecord({"first": SECRET})
        return Message(reply.content, reply_to=message, ttl=4711.0)

    (usual,), _ = one_round(private(location), lambda m: Round.of(m).reply(network()), network())
    (reply,), report = one_round(private(location), adds, network())
    assert report.accepted == [10]
    assert said(reply) == said(usual)
    assert said(reply)["metrics"] == {"num-examples": 1}
    assert reply.metadata.ttl != 4711.0


def test_an_attestation_of_the_app_s_own_does_not_stand_for_the_noise() -> None:
    def attests(message: Message) -> Message:
        reply = moved_to(0.5)(message)
        reply.content["attested"] = Round.of(message).attestation.record
        return reply

    (reply,), _ = one_round(private(), attests, network())
    sent = reply.content.array_records["arrays"]
    assert all(len(np.unique(array.numpy())) > 1 for array in sent.values())
