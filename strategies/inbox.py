"""From deliveries to one outcome a client: what it contributes, or why it does not count."""

from collections.abc import Iterable

import torch
from flwr.common.constant import ErrorCode

from .delivery import LATE, UNSENT, Delivery
from .global_model import GlobalModel
from .reply_pull import UNFINISHED
from .reports import Rejection
from .screening import Contribution, RejectedReply, one_line, screen_reply

# What the SuperLink writes in a client's place when nothing came from it.
_NO_REPLY = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}


def screen_inbox(
    inbox: Iterable[Delivery],
    model: GlobalModel,
    local_lr: float,
    rows: torch.Tensor | None = None,
) -> tuple[dict[int, Contribution], list[Rejection]]:
    """Contributions by client id, in the inbox's order, and the rejected with their reasons.

    The updates are the first rows of `rows` where it is given: one row a message is enough.
    """
    contributions: dict[int, Contribution] = {}
    rejected = []
    for delivery in inbox:
        try:
            if delivery.message is None:
                raise RejectedReply(delivery.problem)
            # A rejected reply leaves its row to the next.
            row = None if rows is None else rows[len(contributions)]
            contribution = screen_reply(delivery.message, model, local_lr, row)
            contributions[delivery.client] = contribution
        except RejectedReply as rejection:
            rejected.append(
                Rejection(delivery.client, one_line(str(rejection)), _replied(delivery))
            )
        except Exception as error:  # what screening did not think of must not end the round
            reason = f"the reply cannot be read: {type(error).__name__}: {error}"
            rejected.append(Rejection(delivery.client, one_line(reason)))
    return contributions, rejected


def _replied(delivery: Delivery) -> bool:
    message = delivery.message
    if message is None:
        return delivery.problem not in (LATE, UNSENT, UNFINISHED)
    return not (message.has_error() and message.error.code in _NO_REPLY)
