"""Canary clients among the simulated ones: each sends one random direction, longer than allowed."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from flwr.app import Error, Message, MessageType

from blackthorn.client_app.messages import (
    enrolment_reply,
    read_round,
    start_vector,
    train_reply,
    trained_arrays,
)
from blackthorn.client_app.private_update import noised_models
from blackthorn.flower_port.synchronous import CLIENT_APP_RAISED, SynchronousGrid
from blackthorn.simulation.engine import EngineGrid

# What a canary says it has: where counts set the weights, it takes all the weight it can.
CLAIMED_EXAMPLES = 10**6
# How much longer than the bound its update is: what is claimed counts on nobody's keeping to it.
LONGER = 10.0
_FIRST_NODE = 10**6


class CanaryGrid(SynchronousGrid):
    """The clients of `inner`, and one canary a row of `directions` [k, d] (unit vectors).

    A canary's update is LONGER times `bound(η_l)` in its direction. With noise at the clients it is
    an honest client of the mechanism, which bounds and noises it; else the server has to bound what
    comes. The first `honest` nodes of `inner` are its clients; the
    canaries' ids follow theirs, and `inner`'s configuration counts both. `alone`: all clients but
    the canaries fail in every round.
    """

    def __init__(
        self,
        inner: EngineGrid,
        honest: int,
        directions: torch.Tensor,
        bound: Callable[[float], float],
        alone: bool = False,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._honest = honest
        self._directions = directions
        self._bound = bound
        self._alone = alone

    @property
    def is_closed(self) -> bool:
        """The inner clients are simulated here, and so are the canaries."""
        return self._inner.is_closed

    def get_node_ids(self) -> Iterable[int]:
        """The inner nodes and the canaries."""
        canaries = range(_FIRST_NODE, _FIRST_NODE + len(self._directions))
        return [*islice(self._inner.get_node_ids(), self._honest), *canaries]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """The replies to `messages`: those of the inner clients, then the canaries'."""
        sent = list(messages)
        inner = [m for m in sent if m.metadata.dst_node_id < _FIRST_NODE]
        canaries = [m for m in sent if m.metadata.dst_node_id >= _FIRST_NODE]
        if self._alone and inner and inner[0].metadata.message_type == MessageType.TRAIN:
            failure = Error(CLIENT_APP_RAISED, "fails in every round")
            replies = [Message(failure, reply_to=message) for message in inner]
        else:
            replies = list(self._inner.send_and_receive(inner, timeout=timeout)) if inner else []
        return [*replies, *self._answer(canaries)]

    def _answer(self, messages: Sequence[Message]) -> list[Message]:
        if not messages:
            return []
        config = self._inner.config
        rows = [message.metadata.dst_node_id - _FIRST_NODE for message in messages]
        ids = [self._honest + row for row in rows]
        if messages[0].metadata.message_type == MessageType.QUERY:
            return [
                enrolment_reply(message, client, CLAIMED_EXAMPLES)
                for message, client in zip(messages, ids, strict=True)
            ]
        request = read_round(messages[0])
        model = self._inner.problem.model
        start = start_vector(request.arrays, model)
        length = LONGER * request.local_lr * self._bound(request.local_lr)
        params = start - length * self._directions[rows].to(start.dtype)
        if config.noise_location == "client":
            params = noised_models(config, start, params, [request] * len(ids), ids)
        arrays = trained_arrays(request.arrays, model, params)
        return [
            train_reply(message, request, own, CLAIMED_EXAMPLES, None)
            for message, own in zip(messages, arrays, strict=True)
        ]


def random_directions(count: int, dimension: int, generator: np.random.Generator) -> torch.Tensor:
    """`count` independent uniform unit vectors, float64 [count, dimension]."""
    drawn = generator.standard_normal((count, dimension))
    return torch.from_numpy(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))
