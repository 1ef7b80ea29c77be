"""Which client is behind which node: stable client ids over Flower's changing node ids.

Without authentication a node gets a new id at every registration, so the server asks each node it
has not seen for the client it holds. Plain Flower apps do not answer that; for them the node's id
is the client's (`identity = "node"`).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from blackthorn.flower_port.transports import AwaitedReply, Delivery, LinkDown, Transport

from .enrolment_messages import (
    NOT_SAID,
    CannotTakePart,
    GuardedLink,
    has_no_query,
    is_an_answer,
    question,
    read_enrolment,
)
from .key_holders import KeyHolders
from .release import Link
from .reports import Refusal
from .screening import RejectedReply, content_of, one_line, read_count

_MAX_ATTEMPTS = 3
_MOST_PROBLEMS = 5
# What an operator is told of a run that waits.
WAITING = "waiting for %s connected: %g s (start-timeout) at most"
HELD = "client %d is held by node %d"
PAUSED = "nobody is connected: the run pauses, for %g s (start-timeout) at most"
ALONE = "nobody is connected: rounds are of noise alone, and are charged, until somebody is"

logger = logging.getLogger("blackthorn")


class NotEnoughClients(RuntimeError):
    """Too few clients enrolled in time; the message says who is missing, and why if they said."""


@dataclass(frozen=True)
class Client:
    """An enrolled client. `num_examples` is what it declared first, None where nobody asked; it is
    `declared`, or 1 where the client did not say."""

    client_id: int
    node_id: int
    num_examples: int | None
    declared: bool = True


class ClientRegistry:
    """Knows every client that ever enrolled and the node that holds it now.

    With `identity = "key"` nodes are asked as with "query", and a client stays with the node that
    enrolled it first, also while that node is away: where nodes have to authenticate, a node's id
    is that of its registered key, over all its connections, and no other key can take the client,
    but one that the operator registered for it (`blackthorn register`): once the other is away,
    or at once where it replaces the other's. A key that is registered for a client is that client
    from the first round on, and no other.

    `population`: with "query" and "key", the ids are 0 to population - 1 (None: any). Without
    that limit an attacker with many nodes could enrol as many clients as it likes. `grace`: seconds
    that a round waits for new nodes that may hold a client that is missing. `claim`: whether what
    single clients say of themselves is withheld, asked at every question. Raises ValueError for
    another identity.
    """

    def __init__(
        self,
        identity: Literal["query", "key", "node"] = "node",
        population: int | None = None,
        grace: float = 5.0,
        claim: Callable[[], bool] = lambda: False,
    ) -> None:
        if identity not in ("query", "key", "node"):
            raise ValueError(f"identity = {identity!r} is not allowed: query, key or node")
        self.grace = grace
        self._identity = identity
        self._population = population
        self._clients: dict[int, Client] = {}
        self._online: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._asked: dict[int, AwaitedReply] = {}
        self._claim = claim
        # Nodes whose app answers no query, which are asked by a train message; those whose app
        # answers that no better.
        self._by_train: set[int] = set()
        self._mute: set[int] = set()
        # What was wrong with the last answer, by who gave it: "client 1", or "node 4711".
        self._problems: dict[str, str] = {}
        self._link = GuardedLink()
        self._holders = KeyHolders()
        # Whether the last round began with nobody.
        self._alone = False
        # Nodes that hold a client which another node holds too, in the order of their answers.
        self._waiting: dict[int, Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, client_id: int) -> Client:
        return self._clients[client_id]

    def clients(self) -> list[int]:
        """Ids of the population to sample from, ascending: all clients that ever enrolled.

        A node's own id is not stable: with `identity = "node"` only who is connected counts.
        """
        return self.online() if self._identity == "node" else sorted(self._clients)

    def online(self) -> list[int]:
        """Ids of the clients whose node is connected, ascending."""
        return sorted(c for c, client in self._clients.items() if client.node_id in self._online)

    def examples(self, client_id: int, claimed: int | None) -> int:
        """A client's number of examples: what it claims now, but no more than it declared first."""
        declared = self[client_id].num_examples
        if claimed is None:
            return declared or 1
        return claimed if declared is None else min(claimed, declared)

    def awaited(self) -> set[int]:
        """Nodes that were asked and have neither answered nor missed their time."""
        return set(self._asked)

    def values(self) -> list[list[int]]:
        """Client, last node and declared count of everybody who was asked, for `restore`."""
        return [
            [client.client_id, client.node_id, client.num_examples]
            for client in self._clients.values()
            if client.num_examples is not None
        ]

    def restore(self, values: Iterable[Sequence[int]]) -> None:
        """Go on with the clients of another registry: they are the population.

        A client is connected once its node is there again, or another says that it holds it.
        """
        for client_id, node_id, num_examples in values:
            self._clients[client_id] = Client(client_id, node_id, num_examples)
            # For `blackthorn status`, which knows of a run what its output says.
            logger.info(HELD, client_id, node_id)

    def refresh(self, transport: Transport, timeout: float) -> set[int]:
        """See who is connected, ask the nodes not seen yet, take in who has answered.

        Does not wait for nodes: one may answer within `timeout` seconds, and is taken in by a
        later call. A SuperLink that is silent for so long leaves everything as it was: this takes
        no longer. Returns the nodes that were asked.
        """
        deadline = time.monotonic() + timeout
        try:
            self._online = transport.node_ids(timeout)
        except LinkDown as error:
            logger.warning("who is connected is not known: %s", error)
            return set()
        if self._identity == "node":
            new_nodes = self._online - self._clients.keys()
            if new_nodes:
                self._ask_whose_keys(transport)
            # Two keys of one client are one: the one before counts no more.
            self._online -= self._holders.replaced(self._online)
            self._clients.update((node, Client(node, node, None)) for node in new_nodes)
            return set()
        # A client that comes back under its key may have been given other examples.
        self._attempts = {n: tries for n, tries in self._attempts.items() if n in self._online}
        self._take_answers(transport)
        self._take_over()
        holders = {client.node_id for client in self._clients.values()}
        known = holders | self._asked.keys() | self._waiting.keys()
        new = [
            node
            for node in sorted(self._online - known)
            if self._attempts.get(node, 0) < _MAX_ATTEMPTS
        ]
        for node in new:
            self._attempts[node] = self._attempts.get(node, 0) + 1
        questions = [
            question(node, timeout, by_train=node in self._by_train, claim=self._claim())
            for node in new
        ]
        sending = max(0.0, deadline - time.monotonic())
        asked = transport.send(questions, new, timeout, sending)
        self._asked.update(zip(new, asked, strict=True))
        self._take_answers(transport)
        return set(new)

    @property
    def link(self) -> Link:
        """Whether, when `refusals` was last asked, nobody saw what another node sends."""
        return self._link.kind

    def refusals(self, transport: Transport) -> list[Refusal]:
        """What the SuperLink has refused since the last call."""
        return self._link.refusals(
            transport, {c.node_id: c.client_id for c in self._clients.values()}
        )

    def _take_answers(self, transport: Transport) -> None:
        """Enrol the nodes whose answer has come; a node without one may be asked again."""
        if self._identity == "key" and any(answer.over() for answer in self._asked.values()):
            self._ask_whose_keys(transport)
        for node, answer in list(self._asked.items()):
            if answer.over():
                del self._asked[node]
                self._enrol(answer.delivery())

    def _ask_whose_keys(self, transport: Transport) -> None:
        if found := self._link.holders(transport):
            self._holders = KeyHolders(found)

    def _enrol(self, delivery: Delivery) -> None:
        node = delivery.client
        try:
            if delivery.message is None:
                raise RejectedReply(delivery.problem)
            client_id, num_examples = read_enrolment(delivery.message)
            self._check_population(client_id)
            self._holders.check(node, client_id, num_examples)
            declared = read_count(content_of(delivery.message)) is not None
        except RejectedReply as rejection:
            self._note_refused(delivery, rejection)
            return
        client = Client(client_id, node, num_examples, declared)
        holder = self._clients.get(client_id)
        if holder is None or self._may_hold(node, holder):
            self._assign(client)
            return
        self._waiting[node] = client
        state = "belongs to the key of" if self._identity == "key" else "is connected as"
        logger.warning(
            "node %s refused: client %d %s node %s", node, client_id, state, holder.node_id
        )

    def _note_refused(self, delivery: Delivery, rejection: RejectedReply) -> None:
        """An app that answers no query is asked by a train message; what else is wrong is noted."""
        node, by_train = delivery.client, delivery.client in self._by_train
        if has_no_query(delivery.message) and not by_train:
            self._by_train.add(node)
            return
        if by_train and not is_an_answer(delivery.message):
            self._mute.add(node)
            self._attempts[node] = _MAX_ATTEMPTS
            rejection = RejectedReply(NOT_SAID)
        self._note_problem(delivery, rejection)

    def _check_population(self, client_id: int) -> None:
        """Raises RejectedReply for a client that is none of the run's."""
        if self._population is not None and client_id >= self._population:
            raise RejectedReply(
                f"client-id = {client_id} is not one of the run's {self._population} clients"
            )

    def _note_problem(self, delivery: Delivery, rejection: RejectedReply) -> None:
        """Log why a node did not enrol; what it answered itself is for the final refusal too."""
        who = node = f"node {delivery.client}"
        # A word about a client that is there is not that client's word.
        if isinstance(rejection, CannotTakePart) and rejection.client_id not in self.online():
            who = f"client {rejection.client_id}"
        problem = one_line(str(rejection))
        logger.warning("%s did not enrol: %s", who if who == node else f"{who} on {node}", problem)
        if delivery.message is not None:
            self._problems[who] = problem

    def _may_hold(self, node: int, holder: Client) -> bool:
        """Whether a node may hold the client from now on that another one holds."""
        is_gone = holder.node_id not in self._online
        if self._identity != "key":
            return is_gone
        return self._holders.may_follow(node, holder.client_id, holder.node_id, is_gone=is_gone)

    def _take_over(self) -> None:
        """Let a refused node hold its client once the other node is gone.

        A node that is restarted registers anew before the server knows that the old one is dead.
        """
        for node, client in list(self._waiting.items()):
            if node not in self._online:
                del self._waiting[node]
            elif self._may_hold(node, self._clients[client.client_id]):
                del self._waiting[node]
                self._assign(client)

    def _assign(self, client: Client) -> None:
        for who in (f"client {client.client_id}", f"node {client.node_id}"):
            self._problems.pop(who, None)
        # A client that comes back keeps the weight it enrolled with first.
        before = self._clients.get(client.client_id, client)
        self._clients[client.client_id] = Client(
            client.client_id, client.node_id, before.num_examples, before.declared
        )
        logger.info(HELD, client.client_id, client.node_id)

    def wait_for(
        self, transport: Transport, num_clients: int, minimum: int | None, timeout: float
    ) -> None:
        """Wait until `num_clients` are enrolled, at most `timeout` seconds.

        Goes on with a warning if at least `minimum` are there by then, with None whoever is; raises
        NotEnoughClients if not. Both name the clients that are missing, and what was wrong with
        nodes' answers. Who answers with an error is waited for all the same: it may come back with
        other examples.
        """
        began = time.monotonic()
        deadline = began + timeout
        told = False
        while True:
            self.refresh(transport, timeout)
            if len(self.online()) >= num_clients:
                return
            if len(self._online) >= num_clients and self._online <= self._mute:
                raise NotEnoughClients(f"of {len(self._online)} connected nodes each {NOT_SAID}")
            if time.monotonic() >= deadline:
                break
            # Who was just asked has a moment to answer before the operator is told.
            asking = self.awaited() and time.monotonic() - began < min(self.grace, timeout / 2)
            if not (told or asking):
                logger.info(WAITING, f"{num_clients} clients, {len(self.online())} are", timeout)
                told = True
            time.sleep(min(transport.polling.nodes, max(0.0, deadline - time.monotonic())))
        state = (
            f"{len(self.online())} of {num_clients} clients connected within {timeout:g} s "
            "(start-timeout)"
        )
        state += self._missing(num_clients) + self._reasons()
        if minimum is not None and len(self.online()) < max(1, minimum):
            raise NotEnoughClients(state)
        logger.warning("%s; going on with those", state)

    def wait_for_any(
        self, transport: Transport, minimum: int | None, timeout: float, pause: float
    ) -> float:
        """Refresh; where fewer than `minimum` are connected, give them `timeout` seconds.

        A round that nobody can answer would be over at once, and a run with it: where nobody is
        connected the run pauses, and NotEnoughClients is raised after `pause` seconds. Where
        clients are missing, new nodes have a moment to say that they hold them. With `minimum` None
        the round begins at once, whoever is connected: were it to wait where one is missing, that
        one's being there would keep out others, who come back meanwhile. Returns since when, on the
        monotonic clock, enough are connected as far as is known: from then the round's time runs.
        """
        began = since = time.monotonic()
        if minimum is None:
            self.refresh(transport, timeout)
            was_alone, self._alone = self._alone, not self.online()
            if self._alone and not was_alone:
                logger.warning(ALONE)
            return began
        asked: set[int] = set()
        paused = False
        while True:
            asked |= self.refresh(transport, max(0.0, since + timeout - time.monotonic()))
            waited = time.monotonic() - began
            online = len(self.online())
            enough = online >= max(1, minimum)
            if not enough:
                since = time.monotonic()
            hopeful = online < len(self._clients) and bool(asked & self.awaited())
            if enough and not (hopeful and waited < self.grace):
                break
            left = (timeout if online else pause) - waited
            if left <= 0:
                break
            if not (online or paused or self.awaited()):
                logger.warning(PAUSED, pause)
                paused = True
            time.sleep(min(transport.polling.nodes, left))
        if not online:
            raise NotEnoughClients(
                f"nobody has been connected for {pause:g} s (start-timeout){self._reasons()}"
            )
        if paused:
            logger.warning("%d clients are connected: the run goes on", online)
        return since

    def _missing(self, num_clients: int) -> str:
        if self._identity == "node":
            return ""
        missing = sorted(set(range(num_clients)) - set(self.online()))
        return f"; missing: {_shorten(missing)}" if missing else ""

    def _reasons(self) -> str:
        told = [f"; {who}: {problem}" for who, problem in self._problems.items()]
        left = len(told) - _MOST_PROBLEMS
        return "".join(told[:_MOST_PROBLEMS]) + (f"; and {left} more" if left > 0 else "")


def _shorten(ids: Iterable[int]) -> str:
    listed = [str(i) for i in ids]
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
