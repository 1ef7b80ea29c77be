"""Simulated clients that are trained each on its own: one after the other in this process, or side
by side in processes, with the same results.

A process holds one model and the examples of a few clients, and no more messages are under way than
there are processes.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from flwr.app import Context, Error, Message, MessageType, RecordDict

from blackthorn.client_app.disclosure import (
    UNTOLD,
    PublicRefusal,
    disclosed,
    kept_from_the_server,
    told_problem,
)
from blackthorn.client_app.node_data import held_out_of
from blackthorn.client_app.trained_alone import evaluate_alone, train_alone
from blackthorn.flower_port.synchronous import CLIENT_APP_RAISED, as_a_task
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.settings.config import RunConfig
from blackthorn.settings.privacy_checks import claims_anything
from blackthorn.tasks.own_project import ProjectShard
from blackthorn.tasks.problem import Problem, load_problem
from blackthorn.tasks.shards import Shard
from blackthorn.wire import CONFIG, POISON

# A client's number, its message, and the records that it keeps from round to round.
Job = tuple[int, Message, RecordDict]


@dataclass(frozen=True)
class Answerer:
    """Answers as the ClientApp of any of the clients would."""

    config: RunConfig
    problem: Problem
    shards: Sequence[Shard]

    def __call__(self, job: Job) -> tuple[Message, RecordDict]:
        """The reply, and what the client keeps."""
        client, message, kept = job
        context = Context(0, client, {}, kept, {})
        try:
            reply = disclosed(self.config, self._reply(client, message, context))
        except PublicRefusal as refusal:
            reply = _raised(message, str(refusal))
        except Exception as error:
            said = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            reply = _raised(message, told_problem(self.config, said))
        return reply, context.state

    def _reply(self, client: int, message: Message, context: Context) -> Message:
        shard = self.shards[client]
        if message.metadata.message_type == MessageType.TRAIN:
            poison = str(message.content[CONFIG].get(POISON, ""))
            shard = self.problem.poisoned(shard, poison)
            return train_alone(self.config, self.problem, client, shard, message, context)
        return evaluate_alone(self.problem, held_out_of(shard), message, context)


class ClientsAlone:
    """The clients of a simulation; `client-processes` of them at a time.

    Raises ValueError where the examples of one cannot be had.
    """

    def __init__(self, config: RunConfig, problem: Problem, shards: Sequence[Shard]) -> None:
        self._config = config
        self._answer = Answerer(config, problem, shards)
        # Own code may deal examples to some clients alone, which shows before the first round.
        self.num_examples, self.has_held_out = list[int](), False
        for shard in shards:
            self.num_examples.append(shard.num_examples)
            self.has_held_out |= isinstance(shard, ProjectShard) and shard.holds_out
        self._kept: dict[int, RecordDict] = {}
        self._pool: ProcessPoolExecutor | None = None

    def answer(self, asked: Sequence[tuple[int, Message]]) -> list[Message]:
        """The replies, in the order of the messages."""
        jobs = [
            (client, message, self._kept.get(client, RecordDict())) for client, message in asked
        ]
        processes = min(self._config.client_processes, len(jobs))
        answers = map(self._answer, jobs) if processes < 2 else self._side_by_side(jobs, processes)
        replies = []
        for (client, _), (reply, kept) in zip(asked, answers, strict=True):
            self._kept[client] = kept
            replies.append(reply)
        return replies

    def _side_by_side(self, jobs: Sequence[Job], most: int) -> Iterator[tuple[Message, RecordDict]]:
        under_way: list[tuple[Job, Future[tuple[Message, RecordDict]]]] = []
        for job in jobs:
            if len(under_way) == most:
                yield self._result(*under_way.pop(0))
            under_way.append((job, self._submit(job)))
        while under_way:
            yield self._result(*under_way.pop(0))

    def _submit(self, job: Job) -> Future[tuple[Message, RecordDict]]:
        if self._pool is None:
            self._pool = self._processes(self._config.client_processes)
        try:
            return self._pool.submit(_work, job)
        except BrokenProcessPool:
            self._pool = None
            return self._submit(job)

    def _result(
        self, job: Job, future: Future[tuple[Message, RecordDict]]
    ) -> tuple[Message, RecordDict]:
        """Under a claim a client that ends its process has no reply, as on a node of its own: that
        the run ends would tell of it. The others of that process are asked again."""
        try:
            return future.result()
        except BrokenProcessPool:
            if not claims_anything(self._config):
                self._pool = None
                raise RunFailed(
                    "a process of the clients has ended, for want of memory, for example: set "
                    "client-processes lower"
                ) from None
        try:
            with self._processes(1) as alone:
                return alone.submit(_work, job).result()
        except BrokenProcessPool:
            return _raised(job[1], UNTOLD), job[2]

    def _processes(self, most: int) -> ProcessPoolExecutor:
        # A fork of this process could hang in the locks of its threads.
        start = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(most, start, _begin, (self._config,))


def _raised(message: Message, reason: str) -> Message:
    return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)


# In a process of the clients.
_answerers: list[Answerer] = []


def _begin(config: RunConfig) -> None:
    ends_with_its_parent()
    as_a_task()
    problem = load_problem(config)
    _answerers.append(Answerer(config, problem, problem.shards()))


def ends_with_its_parent() -> None:
    """In a worker process: a Ctrl-C is the parent's, which ends its workers; where it was killed,
    and could not, they end too: they would write on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: Job) -> tuple[Message, RecordDict]:
    (answerer,) = _answerers
    with kept_from_the_server(answerer.config):
        return answerer(job)
