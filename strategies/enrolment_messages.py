"""The question which client a node holds, and what comes back.

It is a query; an app that has none registered, as any plain Flower app, is asked again by a train
message, which the mod `blackthorn.client_app.mod` answers before the app sees it.
"""

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from blackthorn.installation import CODE
from blackthorn.wire import ASK, CLAIM, CLIENT_ID, CONFIG, ENROL, PROBLEM, SERVER_CODE

from .screening import RejectedReply, content_of, read_count, scalar_metrics

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
