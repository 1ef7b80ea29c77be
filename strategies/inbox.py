"""From messages to one outcome a client: whose reply is it, and does it count."""

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Message

from .delivery import LATE, Delivery
from .layout import ModelLayout
from .reports import Rejection
from .screening import Contribution, RejectedReply, screen_reply


def attribute_replies(
    replies: Iterable[Message],
    clients: Sequence[int],
    client_of_node: Mapping[int, int],
    client_of_message: Mapping[str, int],
) -> list[Delivery]:
    """One Delivery a client of the cohort, for replies that Flower collected itself.

    Errors written by the SuperLink carry its own node id, so the message a reply answers decides
    whose it is, and the node only where that is not known. A second reply does not count.
    """
    found: dict[int, Message] = {}
    for reply in replies:
        client = client_of_message.get(reply.metadata.reply_to_message_id)
        if client is None:
            client = client_of_node.get(reply.metadata.src_node_id)
        if client is not None:
            found.setdefault(client, reply)
    return [
        Delivery(client, found.get(client), "" if client in found else LATE) for client in clients
    ]


def screen_inbox(
    inbox: Iterable[Delivery], layout: ModelLayout
) -> tuple[dict[int, Contribution], list[Rejection]]:
    """Contributions by client id, in the inbox's order, and the rejected with their reasons."""
    contributions: dict[int, Contribution] = {}
    rejected = []
    for delivery in inbox:
        if delivery.message is None:
            rejected.append(Rejection(delivery.client, delivery.problem))
            continue
        try:
            contributions[delivery.client] = screen_reply(delivery.message, layout)
        except RejectedReply as rejection:
            rejected.append(Rejection(delivery.client, str(rejection)))
    return contributions, rejected
