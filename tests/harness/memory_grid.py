"""A Flower Grid in memory, and plain ClientApps whose training has a closed form."""

import ast
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from blackthorn.flower_port.synchronous import as_a_task
from blackthorn.flower_port.transports import (
    AwaitedReply,
    Polling,
    PullingTransport,
    Transport,
)
from blackthorn.strategies.attestation import Attestation, SentRule

# What a node does with a message when its reply is pulled: it answers, has not yet (None), or
# makes the pull itself raise or block.
Answer = Callable[[Message], Message | None]


class MemoryGrid(Grid, Transport):
    """`nodes` maps node ids to what they answer; those in `unreachable` cannot be sent to.

    Without `message_ids` replies can be told apart by their nodes alone. Its replies are pulled one
    by one, as those of Flower's own grids, only more often.
    """

    polling = Polling(reply=0.002, each=0.0, arrival=0.002, nodes=0.002)

    def __init__(self, nodes: Mapping[int, Answer], *, message_ids: bool = True) -> None:
        as_a_task()
        self.nodes = dict(nodes)
        self.unreachable: set[int] = set()
        self.sent: list[Message] = []
        self._message_ids = message_ids
        self._pending: dict[str, Message] = {}
        self._run: Any = None
        self._pulled = PullingTransport(self, self.polling)

    def send(
        self,
        messages: Sequence[Message],
        clients: Sequence[int],
        seconds: float,
        sending: float | None = None,
    ) -> list[AwaitedReply]:
        return self._pulled.send(messages, clients, seconds, sending)

    def node_ids(self, seconds: float) -> set[int]:
        return self._pulled.node_ids(seconds)

    @property
    def is_closed(self) -> bool:
        return True

    def guard_report(self) -> dict[str, Any]:
        return self._pulled.guard_report()

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids: list[Any] = []
        for message in messages:
            self.sent.append(message)
            key = str(uuid4())
            if self._message_ids:
                message.metadata.__dict__["_message_id"] = key
            if message.metadata.dst_node_id in self.unreachable:
                ids.append(None)
                continue
            self._pending[key] = message
            ids.append(key)
        return ids  # with None for what was not sent, as Flower's own grid does

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for key in message_ids:
            message = self._pending[key]
            answer = self.nodes.get(message.metadata.dst_node_id, silence)
            reply = answer(message)
            if reply is not None:
                del self._pending[key]
                replies.append(reply)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        del timeout
        return self.pull_messages([key for key in self.push_messages(messages) if key])

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run


# Real apps are processes of their own. Here the replies are pulled by threads, and CPython 3.11's
# parser, which NumPy reads .npy headers with, loses count when two threads use it at once.
ONE_APP_AT_A_TIME = threading.Lock()
_ONE_TREE, _literal_eval = threading.Lock(), ast.literal_eval


def _one_at_a_time(source: Any) -> Any:
    with _ONE_TREE:
        return _literal_eval(source)


# Also for nodes whose answer is no app's.
vars(ast)["literal_eval"] = _one_at_a_time


def silence(message: Message) -> None:
    """A node that never answers."""


def runs(app: ClientApp, **node_config: Any) -> Answer:
    """A node that runs `app`; what it raises comes back as Flower's error reply."""
    state = RecordDict()

    def answer(message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        context = Context(1, node_id, node_config, state, {})
        try:
            with ONE_APP_AT_A_TIME:
                return app(message, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    return answer


# A model with what every framework puts into a state_dict: parameters and running statistics.
SHAPES = {"weight": (2, 3), "bias": (3,)}
DIMENSION = 9


def initial_model() -> ArrayRecord:
    """w_1 = 0, 1/4, 2/4, ...; running mean 5, and a counter."""
    w = np.arange(DIMENSION, dtype=np.float32) / 4
    return state_of(w, np.full(3, 5, dtype=np.float32), 40)


def state_of(w: np.ndarray, running_mean: np.ndarray, counter: int) -> ArrayRecord:
    return ArrayRecord(
        {
            "weight": Array(w[:6].reshape(2, 3)),
            "norm.running_mean": Array(running_mean),
            "norm.num_batches_tracked": Array(np.array(counter, dtype=np.int64)),
            "bias": Array(w[6:]),
        }
    )


def vector_of(arrays: ArrayRecord) -> np.ndarray:
    """w [9] of a model, as float64."""
    parts = [arrays[name].numpy().reshape(-1) for name in SHAPES]
    return np.concatenate(parts).astype(np.float64)


def centre(client: int) -> np.ndarray:
    """The minimum c_i of client i's loss, [9]."""
    return np.random.default_rng([77, client]).normal(size=DIMENSION)


STEPS = 3
LOCAL_LR = 0.125


def trained(w: np.ndarray, client: int) -> np.ndarray:
    """w_i after K steps down ½‖w − c_i‖², in closed form: c_i + (1 − η)^K (w − c_i)."""
    return centre(client) + (1 - LOCAL_LR) ** STEPS * (w - centre(client))


def quadratic_app(
    client: int,
    num_examples: int = 10,
    enrols: Mapping[str, int] | None = None,
    attests: bool = False,
) -> ClientApp:
    """Client i: K gradient steps down ½‖w − c_i‖², and statistics of its own in the buffers.

    It answers a query, which a plain Flower app does not, only where `enrols` says how; and only
    with `attests` it says that it did what the server's rule asked for.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        received = message.content.array_records["arrays"]
        w = np.concatenate([received[name].numpy().reshape(-1) for name in SHAPES])
        for _ in range(STEPS):
            w = w - np.float32(LOCAL_LR) * (w - centre(client).astype(np.float32))
        arrays = state_of(w, np.full(3, 100 + client, dtype=np.float32), 1000 + client)
        metrics = MetricRecord({"num-examples": num_examples, "train-loss": 0.5})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        if attests:
            server_round = message.content.config_records["config"]["server-round"]
            assert isinstance(server_round, int)
            attested = Attestation(SentRule.of(message.content), server_round)
            content["attested"] = attested.record
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        del context
        w = vector_of(message.content.array_records["arrays"])
        loss = 0.5 * float(np.sum((w - centre(client)) ** 2))
        metrics = MetricRecord({"num-examples": num_examples, "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    if enrols:

        @app.query()
        def enrol(message: Message, context: Context) -> Message:
            del context
            content = RecordDict({"metrics": MetricRecord(dict(enrols))})
            return Message(content, reply_to=message)

    return app
