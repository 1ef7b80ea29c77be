"""A Flower Grid that trains a whole cohort at once, in this process.

The same Strategy, the same local training and the same generators as in a deployment; only the
transport and the process per client are gone.
"""

from collections.abc import Iterable, Sequence
from uuid import uuid4

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from client_app.app import local_training, reported_count
from client_app.bounding import bounded_models
from client_app.messages import (
    enrolment_reply,
    read_round,
    start_vector,
    train_reply,
    trained_arrays,
)
from client_app.private_update import noised_models
from client_app.training import client_generator, train_clients
from server_app.config import RunConfig
from server_app.privacy_checks import claims_privacy
from tasks.problem import Problem
from tasks.shards import Shard

# Node ids only have to differ from Flower's own (0 and 1).
_FIRST_NODE = 1000
_CLIENT_APP_RAISED = 2  # Flower's code for a ClientApp that raised an exception


class EngineGrid(Grid):
    """Grid of `config.num_clients` simulated clients of `problem`.

    `synchronous` tells the strategies that a reply is there as soon as it is asked for.
    Raises ValueError for a task whose examples are on the nodes (own-data).
    """

    synchronous = True

    def __init__(self, config: RunConfig, problem: Problem) -> None:
        if problem.task.on_nodes:
            raise ValueError(
                f"task = {config.task} is not allowed in a simulation: the examples are on the "
                "nodes; use blackthorn cluster"
            )
        self._config = config
        self._problem = problem
        self._shards = problem.shards()
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
        # As the ClientApp would: its clients hold nothing out, the server has a test set.
        error = Error(_CLIENT_APP_RAISED, f"the simulation does not answer {kind!r} messages")
        return [Message(error, reply_to=message) for message in messages]

    def _enrol(self, message: Message) -> Message:
        client = _client_of(message)
        count = reported_count(self._config, self._shards[client])
        return enrolment_reply(message, client, count)

    def _train_cohort(self, messages: Sequence[Message]) -> list[Message]:
        # The messages of a round differ in nothing but the client they go to.
        request = read_round(messages[0])
        model = self._problem.model
        shards = [self._shard(message) for message in messages]
        start = start_vector(request.arrays, model)
        params, losses = train_clients(
            model,
            start,
            shards,
            local_training(self._config, request.local_lr),
            [
                client_generator(self._config.seed, request.server_round, _client_of(message))
                for message in messages
            ],
        )
        clients = [_client_of(message) for message in messages]
        params = bounded_models(self._config, start, params, request.local_lr)
        params = noised_models(self._config, params, request, clients)
        silent = claims_privacy(self._config)
        answers = trained_arrays(request.arrays, model, params)
        return [
            train_reply(
                message, arrays, reported_count(self._config, shard), None if silent else loss
            )
            for message, arrays, shard, loss in zip(
                messages, answers, shards, losses.tolist(), strict=True
            )
        ]

    def _shard(self, message: Message) -> Shard:
        """The client's shard; with flipped labels where the simulated attacker poisons them."""
        shard = self._shards[_client_of(message)]
        poison = message.content["config"].get("poison", "")
        return self._problem.poisoned(shard, str(poison))


def _client_of(message: Message) -> int:
    """The client that the node holds: its id is never the server's to tell."""
    return message.metadata.dst_node_id - _FIRST_NODE
