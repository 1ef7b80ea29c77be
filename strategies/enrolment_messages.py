"""Who is who: the question which client a node holds and what comes back, and what the guard of the
SuperLink says of the nodes' keys.

The question is a query; an app that has none registered, as any plain Flower app, is asked again by
a train message, which the mod `blackthorn.client_app.mod` answers before the app sees it. The guard
answers on the ServerApps' own port; of a SuperLink without one nothing is known of any key, and
nothing was refused.
"""

import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from blackthorn.flower_port.transports import Transport
from blackthorn.installation import CODE
from blackthorn.wire import ASK, CLAIM, CLIENT_ID, CONFIG, ENROL, PROBLEM, SERVER_CODE

from .key_holders import KeyHolder
from .release import Link
from .reports import Refusal
from .screening import RejectedReply, content_of, one_line, read_count, scalar_metrics

logger = logging.getLogger("blackthorn")

MAX_CLIENT_ID = 2**31 - 1
NOT_SAID = (
    "does not say which client it holds: add mods=[blackthorn.client_app.mod] to its ClientApp"
)
# Of Flower's error for a kind of message that an app has no function for.
_NO_QUERY = "No query function registered"


class CannotTakePart(RejectedReply):
    """A node's own word that its client cannot take part; the message is its reason."""

    def __init__(self, client_id: int, problem: str) -> None:
        super().__init__(problem)
        self.client_id = client_id


def question(node: int, timeout: float, *, by_train: bool, claim: bool) -> Message:
    """Who the node is. `claim`: it is to say no more of itself than that."""
    config = ConfigRecord({ASK: ENROL, SERVER_CODE: CODE})
    if claim:
        config[CLAIM] = "client"
    kind = MessageType.TRAIN if by_train else MessageType.QUERY
    return Message(RecordDict({CONFIG: config}), node, kind, ttl=timeout)


def has_no_query(message: Message | None) -> bool:
    """Whether a node's app could not be asked by a query."""
    if message is None or not message.has_error():
        return False
    return _NO_QUERY in (message.error.reason or "")


def is_an_answer(message: Message | None) -> bool:
    """Whether what came back may be a node's own word on who it is, or nothing came."""
    if message is None:
        return True
    return message.has_content() and (
        CLIENT_ID in scalar_metrics(message.content) or _problem(message.content) is not None
    )


def read_enrolment(message: Message) -> tuple[int, int]:
    """Client id and number of examples (1 if it declares none) from a node's answer.

    Raises RejectedReply, CannotTakePart where the node says that its client cannot.
    """
    content = content_of(message)
    value = scalar_metrics(content).get(CLIENT_ID, -1.0)
    problem = _problem(content)
    if value == -1 and problem is not None:
        raise RejectedReply(problem)
    if not 0 <= value <= MAX_CLIENT_ID or value != int(value):
        raise RejectedReply(f"client-id = {value:g} is not an integer from 0 to 2^31 - 1")
    if problem is not None:
        raise CannotTakePart(int(value), problem)
    return int(value), read_count(content) or 1


def _problem(content: RecordDict) -> str | None:
    for record in content.values():
        if isinstance(record, ConfigRecord) and isinstance(record.get(PROBLEM), str):
            return str(record[PROBLEM])
    return None


def _kind(report: Mapping[str, Any], is_closed: bool) -> Link:
    """Whether no node learns what another sends, nor anybody on the way: nobody can reach the link,
    or it has a guard that keeps them apart, and says that it is not to be read either."""
    if is_closed:
        return "apart"
    if not report:
        return "open"
    return "apart" if report.get("is_private") is True else "plain"


class GuardedLink:
    """Asks a run's SuperLink. What was refused before the first question is not this run's."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], int] | None = None
        # By the last answer: another run has another link, and one that was restarted no guard.
        self.kind: Link = "open"

    def holders(self, transport: Transport) -> dict[int, KeyHolder]:
        """The keys' holders by their nodes' ids."""
        nodes = transport.guard_report().get("nodes", {})
        return {int(node): KeyHolder(**holder) for node, holder in nodes.items()}

    def refusals(self, transport: Transport, clients: Mapping[int, int]) -> list[Refusal]:
        """What was refused since the last question; `clients` are the clients by their nodes."""
        first, before = self._counted is None, self._counted or {}
        counted, found = {}, []
        report = transport.guard_report()
        self.kind = _kind(report, transport.is_closed)
        for entry in report.get("refusals", []):
            name = entry["key"], entry["kind"]
            counted[name] = entry["count"]
            # A SuperLink that was started again counts from the beginning.
            already = before.get(name, 0) if before.get(name, 0) <= entry["count"] else 0
            new = entry["count"] - already
            if new and not first:
                client, what = clients.get(entry["node"]), one_line(entry["last"])
                found.append(Refusal(entry["key"], client, what, new, entry["barred"]))
        self._counted = counted
        for refusal in found:
            logger.info("the SuperLink refused %s: %s", refusal.key, refusal.what)
        return found
