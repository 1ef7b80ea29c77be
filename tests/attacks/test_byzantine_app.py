"""The Byzantine ClientApp: what it changes in an honest app's answers, and what it leaves."""

from typing import Any

import numpy as np
import pytest
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

from blackthorn.attacks import byzantine_app

LOCAL_LR = 0.5
MODEL = np.array([1.0, 2.0, 3.0], dtype=np.float32)
GRADIENT = np.array([4.0, 0.0, -8.0], dtype=np.float32)


def honest_app(seen: list[tuple[str, Any]] | None = None) -> ClientApp:
    """Answers everything with one step along GRADIENT; notes the poison in its node config."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        if seen is not None:
            seen.append((message.metadata.message_type, context.node_config.get("poison")))
        if context.node_config.get("broken"):
            return Message(Error(1, "no data"), reply_to=message)
        arrays = ArrayRecord({"w": Array(MODEL - LOCAL_LR * GRADIENT)})
        metrics = MetricRecord({"num-examples": 7})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    app.query()(answer)
    return app


def context(**node_config: Any) -> Context:
    return Context(run_id=1, node_id=2, node_config=node_config, state=RecordDict(), run_config={})


def order(kind: str = "train", **config: Any) -> Message:
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(MODEL)}), "config": ConfigRecord(config)}
    )
    return Message(content, 2, kind)


def update(reply: Message, local_lr: float = LOCAL_LR) -> np.ndarray:
    return (MODEL - reply.content.array_records["arrays"]["w"].numpy()) / local_lr


def in_round(server_round: int = 4, client_id: int = 9, **more: Any) -> dict[str, Any]:
    known = {"server-round": server_round, "client-id": client_id, "local-lr": LOCAL_LR}
    return {**known, "seed": 3, **more}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse-average", -GRADIENT),
        ("reverse-scaled-average", -50 * GRADIENT),
        ("sign-flip", -GRADIENT),
        ("inner-product", -0.1 * GRADIENT),
        ("all-ones", np.ones(3)),
        ("baruch", GRADIENT),  # alone, it knows no deviation
        ("mimic", GRADIENT),
        ("min-max", GRADIENT),
        ("min-sum", GRADIENT),
    ],
)
def test_a_vector_attack_changes_its_own_update_and_leaves_the_count(
    name: str, expected: np.ndarray
) -> None:
    reply = byzantine_app(honest_app(), name)(order(**in_round()), context())
    np.testing.assert_allclose(update(reply), expected, rtol=1e-5, atol=1e-6)
    assert reply.content["metrics"]["num-examples"] == 7


def test_the_shift_comes_from_the_shared_seed_and_the_round_alone() -> None:
    app = byzantine_app(honest_app(), "gradient-shift")

    def shift(**config: Any) -> np.ndarray:
        return update(app(order(**config), context())) - GRADIENT

    sequence = np.random.SeedSequence(3, spawn_key=(15, 4, 0))
    expected = 50 * np.random.Generator(np.random.Philox(sequence)).standard_normal(3)
    for client_id in (0, 9):
        np.testing.assert_allclose(shift(**in_round(client_id=client_id)), expected, rtol=1e-4)
    assert not np.allclose(shift(**in_round(server_round=5)), expected, rtol=0.01)
    assert not np.allclose(shift(**in_round(seed=4)), expected, rtol=0.01)


def test_random_directions_are_each_client_s_own() -> None:
    app = byzantine_app(honest_app(), "random-gradient")
    sent = [update(app(order(**in_round(client_id=i)), context())) for i in (0, 1)]
    again = update(app(order(**in_round(client_id=1)), context()))
    for vector in sent:
        assert np.linalg.norm(vector) == pytest.approx(np.linalg.norm(GRADIENT), rel=1e-5)
    np.testing.assert_array_equal(again, sent[1])
    assert not np.allclose(sent[0], sent[1], rtol=0.1)


def test_without_our_round_config_updates_are_in_parameter_units() -> None:
    reply = byzantine_app(honest_app(), "all-ones")(order(), context())
    np.testing.assert_allclose(update(reply, local_lr=1.0), np.ones(3), rtol=1e-6)


def test_label_flip_is_the_node_operator_s_doing() -> None:
    seen: list[tuple[str, Any]] = []
    app = byzantine_app(honest_app(seen), "label-flip")
    node = context()
    reply = app(order(**in_round()), node)
    app(order("evaluate", **in_round()), node)
    assert seen == [("train", "label-flip"), ("evaluate", None)]
    np.testing.assert_allclose(update(reply), GRADIENT, rtol=1e-6)


def test_a_reply_attack_answers_in_its_place_or_raises() -> None:
    reply = byzantine_app(honest_app(), "nan")(order(**in_round()), context())
    assert np.isnan(update(reply)).all()
    with pytest.raises(RuntimeError, match="refuses"):
        byzantine_app(honest_app(), "raise")(order(**in_round()), context())


@pytest.mark.parametrize("name", ["nan", "all-ones", "raise", "slow", "exit"])
@pytest.mark.parametrize("kind", ["query", "evaluate"])
def test_it_enrols_and_evaluates_honestly(name: str, kind: str) -> None:
    reply = byzantine_app(honest_app(), name)(order(kind, **in_round()), context())
    np.testing.assert_allclose(update(reply), GRADIENT, rtol=1e-6)


def test_an_error_of_the_honest_app_is_passed_on() -> None:
    reply = byzantine_app(honest_app(), "all-ones")(order(**in_round()), context(broken=True))
    assert reply.error.reason == "no data"


def test_it_is_a_clientapp_that_takes_flower_s_keywords() -> None:
    app = byzantine_app(honest_app(), "all-ones")
    assert isinstance(app, ClientApp)
    reply = app(message=order("train", **in_round()), context=context())
    np.testing.assert_allclose(update(reply), np.ones(3), rtol=1e-6)


def test_an_unknown_attack_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="attack is 'kindness'; allowed are"):
        byzantine_app(honest_app(), "kindness")
