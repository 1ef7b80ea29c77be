"""From deliveries to one outcome a client: what it contributes, or why it does not count."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blackthorn.flower_port.grids import NO_REPLY, UNFINISHED
from blackthorn.flower_port.transports import LATE, UNSENT, Delivery

from .attestation import Attestation
from .global_model import GlobalModel
from .reports import Rejection
from .screening import Contribution, RejectedReply, one_line, screen_reply


@dataclass(frozen=True)
class Screened:
    """Contributions by client id, in the inbox's order, with their updates as the rows of
    `updates` [K, d]; and the rejected with their reasons."""

    contributions: dict[int, Contribution]
    rejected: list[Rejection]
    updates: torch.Tensor


def screen_inbox(
    inbox: Sequence[Delivery],
    model: GlobalModel,
    local_lr: float,
    attested: Attestation | None = None,
) -> Screened:
    """Screen a round's deliveries; every update is written once, into its row of one matrix.

    `attested`: the attestation without which a reply does not count.
    """
    contributions: dict[int, Contribution] = {}
    rejected = []
    readable = sum(delivery.message is not None for delivery in inbox)
    rows = model.current.new_empty(readable, len(model.current))
    for delivery in inbox:
        try:
            if delivery.message is None:
                raise RejectedReply(delivery.problem)
            # A rejected reply's row is the next one's.
            row = rows[len(contributions)]
            contributions[delivery.client] = screen_reply(
                delivery.message, model, local_lr, row, attested
            )
        except RejectedReply as rejection:
            rejected.append(
                Rejection(delivery.client, one_line(str(rejection)), _replied(delivery))
            )
        except Exception as error:  # what screening did not think of must not end the round
            reason = f"the reply cannot be read: {type(error).__name__}: {error}"
            rejected.append(Rejection(delivery.client, one_line(reason)))
    return Screened(contributions, rejected, rows[: len(contributions)])


def _replied(delivery: Delivery) -> bool:
    message = delivery.message
    if message is None:
        return delivery.problem not in (LATE, UNSENT, UNFINISHED)
    return not (message.has_error() and message.error.code in NO_REPLY)
