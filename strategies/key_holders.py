"""Whose a node's key is: what the server's operator said of it (`blackthorn register`)."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from .screening import RejectedReply


@dataclass(frozen=True)
class KeyHolder:
    """What an operator said of a node's key; None: nothing.

    `client_id` is the only client that it may be, `max_examples` the most that it may declare,
    `replaces` the node of the client's key before, which may be there still.
    """

    key: str
    client_id: int | None = None
    max_examples: int | None = None
    replaces: int | None = None


class KeyHolders:
    """The keys' holders by their nodes' ids, as they were when the guard was last asked."""

    def __init__(self, by_node: Mapping[int, KeyHolder] | None = None) -> None:
        self._by_node = dict(by_node or {})

    def check(self, node: int, client_id: int, num_examples: int) -> None:
        """Raises RejectedReply for what the node's key was not registered for."""
        own = self._by_node.get(node)
        if own is not None and own.client_id not in (None, client_id):
            raise RejectedReply(
                f"client-id = {client_id}, but the key {own.key} is registered for client "
                f"{own.client_id}"
            )
        if own is None or own.client_id is None:
            for holder in self._by_node.values():
                if holder.client_id == client_id:
                    raise RejectedReply(f"client-id = {client_id} is the key {holder.key}'s")
        if own is not None and own.max_examples is not None and num_examples > own.max_examples:
            raise RejectedReply(
                f"num-examples = {num_examples}, but the key {own.key} is registered for at most "
                f"{own.max_examples}"
            )

    def may_follow(self, node: int, client_id: int, before: int, *, is_gone: bool) -> bool:
        """Whether a node may hold the client that the node `before` holds, which `is_gone` or not:
        its key is registered for it, and replaces the other's where that is there."""
        own = self._by_node.get(node)
        if own is None or own.client_id != client_id:
            return False
        return is_gone or own.replaces == before

    def replaced(self, online: Set[int]) -> set[int]:
        """Nodes whose key has been replaced by that of a node that is `online`."""
        replaced = {h.replaces for node, h in self._by_node.items() if node in online}
        return {node for node in replaced if node is not None}
