"""A Flower Grid that trains a whole cohort at once, in this process.

The same Strategy, the same local training and the same generators as in a deployment; only the
transport and the process per client are gone.
"""

from collections.abc import Iterable, Sequence
from uuid import uuid4

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from client_app.app import local_training
from client_app.bounding import bounded_models
from client_app.messages import (
    RoundRequest,
    enrolment_reply,
    read_round,
    start_vector,
    train_reply,
    trained_arrays,
)
from client_app.training import client_generator, train_clients
from server_app.config import RunConfig
from tasks.datasets import Examples
from tasks.problem import Problem, partition_shards
from tasks.shards import ExampleShard

# Node ids only have to differ from Flower's own (0 and 1).
_FIRST_NODE = 1000


class EngineGrid(Grid):
    """Grid of `config.num_clients` simulated clients of `problem`.

    `synchronous` tells the strategies that a reply is there as soon as it is asked for.
    Raises ValueError for a task without training data (own-data).
    """

    synchronous = True

    def __init__(self, config: RunConfig, problem: Problem) -> None:
        if problem.task.train is None:
            raise ValueError(
                f"task = {config.task} is not allowed in a simulation: the examples are on the "
                "nodes; use blackthorn cluster"
            )
        self._config = config
        self._problem = problem
        self._train = problem.task.train
        self._shards = partition_shards(config, self._train)
        self._run = Run.create_empty(1)
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        """Set the run this grid works for."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run this grid works for."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to one node (Flower's older form of `Message(...)`)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All simulated nodes: they never go away."""
        return range(_FIRST_NODE, _FIRST_NODE + self._config.num_clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer the messages at once and keep the replies until they are pulled."""
        sent = list(messages)
        ids = [str(uuid4()) for _ in sent]
        by_node = {reply.metadata.src_node_id: reply for reply in self._answer(sent)}
        for message_id, message in zip(ids, sent, strict=True):
            self._replies[message_id] = by_node[message.metadata.dst_node_id]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to `message_ids`, each once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002 (nothing here waits)
    ) -> Iterable[Message]:
        """The replies to `messages`, in their order."""
        return self._answer(list(messages))

    def _answer(self, messages: Sequence[Message]) -> list[Message]:
        if not messages:
            return []
        kind = messages[0].metadata.message_type
        if kind == MessageType.QUERY:
            return [self._enrol(message) for message in messages]
        if kind == MessageType.TRAIN:
            return self._train_cohort(messages)
        raise ValueError(f"the simulation does not answer messages of type {kind!r}")

    def _enrol(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - _FIRST_NODE
        return enrolment_reply(message, client, self._shards[client].num_examples)

    def _train_cohort(self, messages: Sequence[Message]) -> list[Message]:
        requests = [read_round(message) for message in messages]
        first = requests[0]
        model = self._problem.model
        shards = [
            self._shard(request, message)
            for request, message in zip(requests, messages, strict=True)
        ]
        start = start_vector(first.arrays, model)
        params, losses = train_clients(
            model,
            start,
            shards,
            local_training(self._config, first.local_lr),
            [
                client_generator(self._config.seed, request.server_round, request.client_id)
                for request in requests
            ],
        )
        params = bounded_models(self._config, start, params, first.local_lr)
        return [
            train_reply(
                message,
                trained_arrays(first.arrays, model, row),
                shard.num_examples,
                float(loss),
            )
            for message, row, shard, loss in zip(messages, params, shards, losses, strict=True)
        ]

    def _shard(self, request: RoundRequest, message: Message) -> ExampleShard:
        """The client's shard; with flipped labels where the simulated attacker poisons them."""
        shard = self._shards[request.client_id]
        poison = message.content.config_records["config"].get("poison")
        if poison != "label-flip":
            return shard
        honest = shard.examples
        return ExampleShard(Examples(honest.x, self._problem.task.num_classes - 1 - honest.y))
