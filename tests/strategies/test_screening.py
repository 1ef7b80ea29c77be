"""Bad replies of every kind: each is rejected with its reason, and nothing else happens."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from screened_replies import (
    LOCAL_LR,
    WEIGHT,
    State,
    counting,
    global_model,
    honest,
    order,
    reason,
    reply,
)

from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.flower_port.transports import Delivery
from blackthorn.strategies.aggregation import rage
from blackthorn.strategies.screening import (
    MAX_UPDATE,
    Screened,
    Screening,
    one_line,
    read_count,
    scalar_metrics,
    screen_reply,
)


def test_an_honest_reply_gives_its_update_count_and_metrics() -> None:
    contribution = screen_reply(reply(loss=0.25), global_model(), LOCAL_LR)
    # (w - w_i) / 0.5 over weight and bias; the counter is not part of it
    assert contribution.update.tolist() == [2, 2, 2, 2, 2, 2, -1, 1]
    assert contribution.update.dtype == torch.float32
    assert contribution.num_examples == 5
    assert contribution.metrics == {"loss": 0.25}


def test_screening_leaves_the_global_model_alone() -> None:
    model = global_model()
    contribution = screen_reply(reply(), model, LOCAL_LR)
    contribution.update.fill_(9)
    assert model.current.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_without_metrics_there_is_no_count() -> None:
    message = Message(RecordDict({"a": ArrayRecord(honest())}), reply_to=order())
    assert screen_reply(message, global_model(), LOCAL_LR).num_examples is None


def test_the_order_of_the_entries_does_not_matter() -> None:
    state = dict(reversed(honest().items()))
    one, other = (screen_reply(reply(s), global_model(), LOCAL_LR) for s in (state, honest()))
    assert torch.equal(one.update, other.update)


def screened(delivery: Delivery) -> Screened:
    return Screening([delivery.client], global_model(), LOCAL_LR).result([delivery])


def test_an_error_reply_is_rejected_with_its_reason_in_one_line() -> None:
    message = Message(Error(2, "no\ndata \x1b[2J here"), reply_to=order())
    assert reason(message).startswith("error 2: no")
    rejected = screened(Delivery(4, message)).rejected
    assert [(r.client, r.reason) for r in rejected] == [(4, "error 2: no data [2J here")]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            PublicRefusal("the round would pass max-rounds = 2"),
            "PublicRefusal: the round would pass",
        ),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (RuntimeError("two\nlines"), "RuntimeError: two lines"),
        (type("Mine", (Exception,), {"__module__": "a.f.<locals>"})("b"), "Mine: b"),
    ],
)
def test_an_exception_is_shown_as_python_shows_it(error: Exception, shown: str) -> None:
    """Flower's ClientApp sends its class and its text in a form of its own."""
    form = str(type(error)) + ":<'" + str(error) + "'>"
    rejected = screened(Delivery(4, Message(Error(2, form), reply_to=order()))).rejected
    assert rejected[0].reason.startswith(f"error 2: {shown}")
    assert "class" not in rejected[0].reason
    plain = "see <class 'int'>:<'1'> there"
    assert reason(Message(Error(2, plain), reply_to=order())) == f"error 2: {plain}"


def test_of_an_error_in_flower_s_simulation_the_reason_is_shown_without_its_traceback() -> None:
    raised = "RayTaskError(ClientAppException): ray::ClientAppActor.run()\n  File ...\n"
    raised += "ClientAppException: \nException ClientAppException occurred. Message: too few\n"
    assert reason(Message(Error(2, raised), reply_to=order())) == "error 2: too few"


def test_an_error_without_a_reason() -> None:
    assert reason(Message(Error(8), reply_to=order())) == "error 8: no reason given"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "0 array records"),
        ({"m": MetricRecord({"num-examples": 1})}, "0 array records"),
        ({"c": ConfigRecord({"a": 1})}, "0 array records"),
        ({"a": ArrayRecord()}, "missing entry 'weight' (3 missing)"),
        ({"a": ArrayRecord(honest()), "b": ArrayRecord(honest())}, "2 array records"),
        ({"a": ArrayRecord(honest()), "b": ArrayRecord()}, "2 array records"),
    ],
)
def test_missing_and_surplus_records(content: State, expected: str) -> None:
    assert expected in reason(Message(RecordDict(content), reply_to=order()))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [("weight", (1, 2)), ("bias", (0,))])
def test_values_that_are_not_finite(value: float, place: tuple[str, tuple[int, ...]]) -> None:
    name, index = place
    poisoned = honest()[name].numpy().copy()
    poisoned[index] = value
    found = reason(reply({**honest(), name: Array(poisoned)}))
    assert found == "the model has values that are not finite"


def test_a_finite_model_whose_update_overflows() -> None:
    """w_i fits float32 and (w - w_i)/η does not: one such row would end every rule."""
    poisoned = np.full((2, 3), 3e38, dtype=np.float32)
    assert "too large" in reason(reply({**honest(), "weight": Array(poisoned)}))


@pytest.mark.parametrize("sign", [1, -1])
def test_float64_updates_whose_squares_overflow(sign: int) -> None:
    def state(size: float) -> State:
        return {**honest(), "weight": Array(np.full((2, 3), sign * size))}

    model = global_model("float64")
    assert "too large" in reason(reply(state(MAX_UPDATE)), model)
    largest = screen_reply(reply(state(MAX_UPDATE * LOCAL_LR)), model, LOCAL_LR).update
    # What passes is what the rules take.
    others = torch.zeros(3, len(largest), dtype=torch.float64)
    survivors = rage(torch.vstack([others, largest]), 1).survivors
    assert survivors.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1e30, "1e+30"),
        (10**13, "1e+13"),
        (10**400, "inf"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (0, "0"),
        (0.5, "0.5"),
        (-1, "-1"),
        ([3, 4], "[3, 4]"),
        ([0.5] * 5000, "[0.5, 0.5, "),
    ],
)
def test_a_count_that_is_none_is_rejected_in_a_short_line(value: Any, shown: str) -> None:
    found = reason(counting(value))
    assert found.startswith(f"num-examples = {shown}")
    assert len(found) < 150


@pytest.mark.parametrize(("value", "count"), [(1, 1), (10**12, 10**12), (12.0, 12)])
def test_a_count_up_to_10_to_the_12_counts(value: float, count: int) -> None:
    assert screen_reply(counting(value), global_model(), LOCAL_LR).num_examples == count


def test_a_count_is_found_in_any_metric_record() -> None:
    content = RecordDict(
        {"one": MetricRecord({"loss": 1.5, "losses": [1.0, 2.0]}), "two": MetricRecord({"x": 2})}
    )
    assert read_count(content) is None
    content.metric_records["two"]["num-examples"] = 8
    assert read_count(content) == 8
    assert scalar_metrics(content) == {"loss": 1.5, "x": 2.0}


def test_scalar_metrics_beyond_float64_are_infinite() -> None:
    assert scalar_metrics(RecordDict({"m": MetricRecord({"x": 10**400})})) == {"x": math.inf}


@pytest.mark.parametrize("as_they_come", [False, True])
def test_of_all_deliveries_the_good_are_kept_by_id_and_the_bad_are_named(
    as_they_come: bool,
) -> None:
    other = honest()
    other["weight"] = Array(WEIGHT + 1)
    deliveries = [
        Delivery(5, reply()),
        Delivery(3, None, "no reply by the deadline"),
        Delivery(4, counting(-1)),
        Delivery(7, None, "enough others", surplus=True),
        Delivery(2, reply(other)),
    ]
    screening = Screening([2, 3, 4, 5, 7], global_model(), LOCAL_LR)
    if as_they_come:
        found = [screening.counts(delivery) for delivery in deliveries if not delivery.surplus]
        assert found == [True, False, False, True]
    came = screening.result(deliveries)
    assert list(came.contributions) == [2, 5]
    expected = [screen_reply(reply(s), global_model(), LOCAL_LR).update for s in (other, honest())]
    assert torch.equal(came.updates, torch.stack(expected))
    for one, update in zip(came.contributions.values(), expected, strict=True):
        assert torch.equal(one.update, update)
    assert came.surplus == [7]
    assert [(r.client, r.reason) for r in came.rejected] == [
        (3, "no reply by the deadline"),
        (4, "num-examples = -1 is not a count from 1 to 10^12"),
    ]


def test_what_screening_did_not_think_of_is_a_rejection_too() -> None:
    odd: Any = reply()
    odd.content["a"]["weight"].stype = 5
    rejected = screened(Delivery(1, odd)).rejected
    assert rejected[0].client == 1
    assert "cannot be read: TypeError" in rejected[0].reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\t three", "one two three"),
        ("\x1b]0;title\x07 bell\u202e", "]0;title bell"),
        ("σ ≤ 1", "σ ≤ 1"),
        ("x" * 400, "x" * 300 + "..."),
    ],
)
def test_a_clients_text_becomes_one_printable_line(text: str, expected: str) -> None:
    assert one_line(text) == expected
