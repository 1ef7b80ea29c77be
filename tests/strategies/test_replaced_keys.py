"""A client's new key beside the one before: one client in every round, and none is lost.

The guard's calls are real; the nodes are in memory.
"""

from typing import Any

import grpc
import numpy as np
import pytest
from enrolling_nodes import holds, queries, settle
from flwr.app import ConfigRecord, Message
from memory_grid import LOCAL_LR, Answer, initial_model, quadratic_app, runs, trained, vector_of
from test_enrolment import strategy_round
from test_guarded_link import GuardedGrid, address, channel, records

from blackthorn.flower_port.guard.records import Records, fingerprint
from blackthorn.strategies import GFedAvg, RoundReport
from blackthorn.strategies.enrolment import ClientRegistry

__all__ = ["address", "channel", "records"]
OLD, OTHER, NEW = 11, 12, 13


@pytest.fixture
def replaced(records: Records) -> Records:
    """Client 0 has two keys: that of node 13 replaces that of node 11."""
    records.register(b"key of 11", "node0", {"client_id": 0, "max_examples": 500})
    records.register(b"key of 12", "node1", {"client_id": 1})
    first = print_of(records, b"key of 11")
    known = records.register(b"key of 13", "new-node0", {"replaces": first})
    assert (known.client_id, known.max_examples) == (0, 500)
    return records


def print_of(records: Records, key: bytes) -> str:
    assert records.registration(key).client_id is not None
    return fingerprint(key)


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("identity", ["key", "query", "node"])
@pytest.mark.parametrize("stays", [True, False], ids=["beside", "in place"])
def test_two_keys_of_a_client_are_one_client_and_no_round_is_lost(
    channel: grpc.Channel, identity: Any, stays: bool
) -> None:
    """The old node trains until the new one has enrolled, whether it stays after that or not."""
    asked: dict[int, list[int]] = {}

    def node(number: int, client: int) -> Answer:
        answer = runs(quadratic_app(client, enrols={"client-id": client, "num-examples": 10}))

        def listen(message: Message) -> Message | None:
            if message.metadata.message_type == "train":
                asked.setdefault(int(message.metadata.group_id), []).append(number)
            return answer(message)

        return listen

    reports: list[RoundReport] = []
    grid = GuardedGrid({OLD: node(OLD, 0), OTHER: node(OTHER, 1)}, channel)
    strategy = GFedAvg(
        identity=identity, num_clients=2, local_rate=LOCAL_LR, observers=[reports.append]
    )
    config = ConfigRecord({})
    arrays = strategy_round(strategy, grid, 1, initial_model(), config)
    grid.nodes[NEW] = node(NEW, 0)
    if not stays:
        del grid.nodes[OLD]
    for number in (2, 3, 4):
        arrays = strategy_round(strategy, grid, number, arrays, config)
    if stays:
        del grid.nodes[OLD]
        arrays = strategy_round(strategy, grid, 5, arrays, config)
    assert asked[1] == [OLD, OTHER]
    for number, nodes in asked.items():
        assert len(nodes) == 2 and OTHER in nodes and {OLD, NEW} & set(nodes), (number, nodes)
    assert NEW in asked[max(asked)]
    assert [len(report.accepted) for report in reports] == [2] * len(asked)
    expected = vector_of(initial_model())
    for _ in asked:
        expected = (trained(expected, 0) + trained(expected, 1)) / 2
    np.testing.assert_allclose(vector_of(arrays), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("replaced")
def test_the_new_key_has_the_client_as_soon_as_it_has_said_so(channel: grpc.Channel) -> None:
    registry = ClientRegistry("key", population=2)
    grid = GuardedGrid({OLD: holds(0, num_examples=9)}, channel)
    assert settle(registry, grid) == [0]
    grid.nodes[NEW] = holds(0, num_examples=90)
    assert settle(registry, grid) == [0]
    # With the weight that the client enrolled with first.
    assert (registry[0].node_id, registry[0].num_examples) == (NEW, 9)
    # The old one is asked, and does not get it back while the new one is there.
    assert settle(registry, grid) == [0]
    assert registry[0].node_id == NEW
    del grid.nodes[NEW]
    assert settle(registry, grid) == [0]
    assert registry[0].node_id == OLD
    grid.nodes[NEW] = holds(0)
    assert settle(registry, grid) == [0]
    assert registry[0].node_id == NEW


def test_a_key_that_is_registered_once_the_other_is_gone_has_its_client(
    records: Records, channel: grpc.Channel
) -> None:
    """In a run that goes on: the client is no more the unregistered key's."""
    records.register(b"key of 11", "node0", {"client_id": 0})
    registry = ClientRegistry("key", population=2)
    grid = GuardedGrid({OLD: holds(0)}, channel)
    assert settle(registry, grid) == [0]
    records.forget(b"key of 11")
    records.register(b"key of 13", "new-node0", {"client_id": 0})
    grid.nodes = {NEW: holds(0)}
    assert settle(registry, grid) == [0]
    assert registry[0].node_id == NEW


def test_a_key_of_nobody_s_takes_no_client_over(replaced: Records, channel: grpc.Channel) -> None:
    replaced.forget(b"key of 13")
    registry = ClientRegistry("key", population=2)
    grid = GuardedGrid({OLD: holds(0)}, channel)
    assert settle(registry, grid) == [0]
    grid.nodes = {NEW: holds(0)}
    assert settle(registry, grid) == []
    assert queries(grid)[0] == OLD


def test_a_client_has_no_third_key_and_no_other_s(replaced: Records) -> None:
    first, second = (print_of(replaced, key) for key in (b"key of 11", b"key of 13"))
    with pytest.raises(ValueError, match="client 0 is node0's already"):
        replaced.register(b"third", "third", {"replaces": second})
    with pytest.raises(ValueError, match="client 0 is new-node0's already"):
        replaced.register(b"third", "third", {"replaces": first})
    with pytest.raises(ValueError, match="client 0 is node0's already"):
        replaced.register(b"third", "third", {"client_id": 0})
    for unknown in ("key 0123456789abcdef", print_of(replaced, b"key of 12")):
        with pytest.raises(ValueError, match="is no other key of a client to be replaced"):
            replaced.register(b"key of 12", "node1", {"replaces": unknown})
    # The pair may be named again.
    assert replaced.register(b"key of 11", "node0", {"client_id": 0}).client_id == 0
    assert replaced.register(b"key of 13", "new-node0", {"client_id": 0}).replaces == first


@pytest.mark.parametrize("moved", [b"key of 11", b"key of 13"])
def test_keys_that_are_registered_for_two_clients_do_not_replace_each_other(
    replaced: Records, moved: bytes
) -> None:
    replaced.register(moved, "moved", {"client_id": 2})
    assert replaced.registration(b"key of 13").replaces == ""


def test_the_key_before_is_forgotten_and_the_next_may_follow(
    replaced: Records, tmp_path: Any
) -> None:
    second = print_of(replaced, b"key of 13")
    replaced.forget(b"key of 11")
    again = Records(tmp_path, offences=2)
    known = again.registration(b"key of 13")
    assert (known.client_id, known.max_examples, known.replaces) == (0, 500, "")
    assert again.register(b"third", "third", {"replaces": second}).client_id == 0
