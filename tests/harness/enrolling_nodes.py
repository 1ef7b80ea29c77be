"""Nodes that say, or do not say, which client they are, and a registry that has asked them all."""

import time
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from memory_grid import (
    Answer,
    MemoryGrid,
)

from blackthorn.strategies.enrolment import ClientRegistry

LONG = 60.0

SHORT = 1.0


def holds(client_id: Any, **declared: Any) -> Answer:
    """A node that answers the query with this client id."""
    record = {"client-id": client_id, **{k.replace("_", "-"): v for k, v in declared.items()}}

    def answer(message: Message) -> Message:
        return Message(RecordDict({"metrics": MetricRecord(record)}), reply_to=message)

    return answer


def settle(registry: ClientRegistry, grid: MemoryGrid) -> list[int]:
    """Refresh until no node's answer is awaited; the clients that are connected then."""
    deadline = time.monotonic() + LONG
    asked = registry.refresh(grid, LONG)
    while registry.awaited() or asked:
        assert time.monotonic() < deadline
        time.sleep(0.002)
        asked = registry.refresh(grid, LONG)
    return registry.online()


def queries(grid: MemoryGrid) -> list[int]:
    """The nodes that were asked, in order."""
    assert all(m.metadata.message_type == "query" for m in grid.sent)
    return [m.metadata.dst_node_id for m in grid.sent]


def cannot(client_id: Any, problem: str) -> Answer:
    """A node that answers that its client cannot take part."""

    def answer(message: Message) -> Message:
        metrics = MetricRecord({"client-id": client_id})
        config = ConfigRecord({"problem": problem})
        return Message(RecordDict({"m": metrics, "c": config}), reply_to=message)

    return answer
