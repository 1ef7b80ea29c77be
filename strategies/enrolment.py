"""Which client is behind which node: stable client ids over Flower's changing node ids.

Without authentication a node gets a new id at every registration, so the server asks each node it
has not seen for the client it holds. Plain Flower apps do not answer that; for them the node's id
is the client's (`identity = "node"`).
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from .delivery import Delivery, exchange
from .screening import NUM_EXAMPLES, RejectedReply, content_of, sane_count, scalar_metrics

CLIENT_ID = "client-id"
MAX_CLIENT_ID = 2**31 - 1
_MAX_ATTEMPTS = 3
_POLL_SECONDS = 0.5

logger = logging.getLogger("blackthorn")


class NotEnoughClients(RuntimeError):
    """Too few clients enrolled in time; the message says who is missing."""


@dataclass(frozen=True)
class Client:
    """An enrolled client. `num_examples` is what it declared first, None where unknown."""

    client_id: int
    node_id: int
    num_examples: int | None


class ClientRegistry:
    """Knows every client that ever enrolled and the node that holds it now."""

    def __init__(self, identity: Literal["query", "node"] = "node") -> None:
        self._identity = identity
        self._clients: dict[int, Client] = {}
        self._online: set[int] = set()
        self._attempts: dict[int, int] = {}

    def clients(self) -> list[int]:
        """Ids of all clients that ever enrolled, ascending: the population to sample from."""
        return sorted(self._clients)

    def online(self) -> list[int]:
        """Ids of the clients whose node is connected, ascending."""
        return sorted(c for c, client in self._clients.items() if client.node_id in self._online)

    def __getitem__(self, client_id: int) -> Client:
        return self._clients[client_id]

    def is_online(self, client_id: int) -> bool:
        """Whether the client's node is connected."""
        return self._clients[client_id].node_id in self._online

    def refresh(self, grid: Grid, timeout: float) -> None:
        """Look who is connected and enrol the nodes not seen yet, within `timeout` seconds."""
        self._online = set(grid.get_node_ids())
        known = {client.node_id for client in self._clients.values()}
        new = [
            node
            for node in sorted(self._online - known)
            if self._attempts.get(node, 0) < _MAX_ATTEMPTS
        ]
        if not new:
            return
        if self._identity == "node":
            for node in new:
                self._clients[node] = Client(node, node, None)
            return
        for node in new:
            self._attempts[node] = self._attempts.get(node, 0) + 1
        for delivery in exchange(grid, [_query(node, timeout) for node in new], new, timeout):
            self._enrol(delivery)

    def _enrol(self, delivery: Delivery) -> None:
        node = delivery.client
        if delivery.message is None:
            logger.warning("node %s did not enrol: %s", node, delivery.problem)
            return
        try:
            client_id, num_examples = read_enrolment(delivery.message)
        except RejectedReply as rejection:
            logger.warning("node %s did not enrol: %s", node, rejection)
            return
        before = self._clients.get(client_id)
        if before is not None and before.node_id in self._online:
            self._attempts[node] = _MAX_ATTEMPTS
            logger.warning(
                "node %s refused: client %d is connected as node %s",
                node,
                client_id,
                before.node_id,
            )
            return
        # A client that comes back keeps the weight it enrolled with first.
        count = num_examples if before is None else before.num_examples
        self._clients[client_id] = Client(client_id, node, count)

    def wait_for(self, grid: Grid, num_clients: int, minimum: int, timeout: float) -> None:
        """Wait until `num_clients` are enrolled, at most `timeout` seconds.

        Goes on with a warning if at least `minimum` are there by then; raises NotEnoughClients
        if not. Both name the clients that are missing.
        """
        deadline = time.monotonic() + timeout
        while True:
            self.refresh(grid, max(1.0, deadline - time.monotonic()))
            if len(self.online()) >= num_clients:
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        state = f"{len(self.online())} of {num_clients} clients connected within {timeout:g} s"
        state += self._missing(num_clients)
        if len(self.online()) < max(1, minimum):
            raise NotEnoughClients(state)
        logger.warning("%s; going on with those", state)

    def wait_for_any(self, grid: Grid, minimum: int, timeout: float) -> None:
        """Refresh; where fewer than `minimum` are connected, give them `timeout` seconds.

        A round that nobody can answer would be over at once, and a run with it.
        """
        deadline = time.monotonic() + timeout
        self.refresh(grid, timeout)
        while len(self.online()) < max(1, minimum) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.refresh(grid, max(1.0, deadline - time.monotonic()))

    def _missing(self, num_clients: int) -> str:
        if self._identity == "node":
            return ""
        missing = sorted(set(range(num_clients)) - set(self.online()))
        return f"; missing: {_shorten(missing)}" if missing else ""


def read_enrolment(message: Message) -> tuple[int, int | None]:
    """Client id and number of examples from a node's answer. Raises RejectedReply."""
    metrics = scalar_metrics(content_of(message))
    value = metrics.get(CLIENT_ID, -1.0)
    if not 0 <= value <= MAX_CLIENT_ID or value != int(value):
        raise RejectedReply(f"client-id = {value:g} is not an integer from 0 to 2^31 - 1")
    count = sane_count(metrics[NUM_EXAMPLES]) if NUM_EXAMPLES in metrics else None
    return int(value), count


def _query(node: int, timeout: float) -> Message:
    content = RecordDict({"config": ConfigRecord({"ask": "enrol"})})
    return Message(content, node, MessageType.QUERY, ttl=timeout)


def _shorten(ids: Iterable[int]) -> str:
    listed = [str(i) for i in ids]
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
