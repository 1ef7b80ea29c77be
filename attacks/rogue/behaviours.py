"""What a rogue does in the place of an answer, by name (to the server: `server_attacks.py`).

A behaviour takes a `Turn`, sends whatever it sends, and returns one line on what came of it.
"""

import copy
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from blackthorn.flower_port.fleet import Fleet, ObjectPushError
from blackthorn.wire import ARRAYS, METRICS, SERVER_ROUND

from ..misbehaviour import REPLY_ATTACKS
from .server_attacks import ATTACKS, HELD, Peer

HUGE_BYTES = 500_000_000
# By so much a drip-fed upload is longer than the time that the message allows.
_DRIP_OVERTIME = 1.25


@dataclass(frozen=True)
class Turn:
    """A train message, a reply that would pass, a reply of an earlier round (if any), and the
    rogue's own way to the SuperLink."""

    fleet: Fleet
    order: Message
    honest: Message
    past: Message | None
    peer: Peer

    def seconds_left(self) -> float:
        """Until the message expires."""
        metadata = self.order.metadata
        return metadata.created_at + metadata.ttl - time.time()


Behaviour = Callable[[Turn], str]


def sends(forge: Callable[[Message], Message]) -> Behaviour:
    """Deliver a forged reply as any node would."""

    def send(turn: Turn) -> str:
        return _delivered(turn.fleet.deliver(forge(turn.honest)))

    return send


def huge_reply(turn: Turn) -> str:
    """500 MB in the place of the first array, in Flower's own chunks, all of them different."""

    def grow(reply: Message) -> Message:
        arrays = dict(reply.content.array_records[ARRAYS])
        name = next(iter(arrays))
        data = np.arange(HUGE_BYTES // 8, dtype=np.int64).tobytes()
        arrays[name] = Array(arrays[name].dtype, arrays[name].shape, "numpy.ndarray", data)
        return _with_content(reply, {**reply.content, ARRAYS: ArrayRecord(arrays)})

    return _in_pieces(turn, grow(turn.honest))


def huge_part(turn: Turn) -> str:
    """500 MB in one piece: Flower does not cut the bytes of a config record into chunks."""
    ballast = ConfigRecord({"ballast": bytes(HUGE_BYTES)})
    return _in_pieces(turn, _with_content(turn.honest, {**turn.honest.content, "more": ballast}))


class _Repeating(Array):
    """An array that lists its one chunk 2,500 times."""

    def deflate(self) -> bytes:
        head, _, body = super().deflate().partition(b"\x00")
        said = json.loads(body)
        said["arraychunk_ids"] *= _REPETITIONS
        body = json.dumps(said).encode()
        return head.rpartition(b" ")[0] + b" %d\x00" % len(body) + body


# The name under which Flower's head of an object says what it is.
_Repeating.__qualname__ = Array.__qualname__
_REPETITIONS = 2500


def repeated_chunks(turn: Turn) -> str:
    """400 KB that are a gigabyte once the chunks are put together as they are listed."""
    arrays = dict(turn.honest.content.array_records[ARRAYS])
    name = next(iter(arrays))
    arrays[name] = Array(np.random.default_rng(0).standard_normal(100_000).astype(np.float32))
    forged = _with_content(turn.honest, {**turn.honest.content, ARRAYS: ArrayRecord(arrays)})
    # A record takes copies that are arrays of Flower's own class.
    forged.content.array_records[ARRAYS][name].__class__ = _Repeating
    return _delivered(turn.fleet.deliver(forged))


def never_uploaded(turn: Turn) -> str:
    """Announce a reply, and upload nothing of it."""
    turn.fleet.announce(turn.honest)
    return "announced, nothing uploaded"


def drip_fed(turn: Turn) -> str:
    """Upload a good reply so slowly that the last part would come after the deadline."""
    announcement = turn.fleet.announce(turn.honest)
    pause = _DRIP_OVERTIME * turn.seconds_left() / max(1, len(announcement.missing))
    for uploaded, object_id in enumerate(announcement.missing):
        left = turn.seconds_left()
        time.sleep(max(0.0, min(pause, left)))
        if left <= pause:
            return f"{uploaded} of {len(announcement.missing)} parts uploaded by the deadline"
        announcement.upload(object_id)
    return "uploaded to the end"


def replayed(turn: Turn) -> str:
    """An old reply once more: as it was, and then announced as the answer to this message."""
    if turn.past is None:
        return "no earlier reply to send again: silence"
    again = turn.fleet.deliver(turn.past)
    disguised = turn.fleet.deliver(turn.past, disguised_as=copy.deepcopy(turn.honest))
    return f"as it was: {_delivered(again)}; in disguise: {_delivered(disguised)}"


def forged_round(turn: Turn) -> str:
    """A good reply that says it is for another round."""
    metrics = MetricRecord({**turn.honest.content.metric_records[METRICS], SERVER_ROUND: 1000})
    forged = _with_content(turn.honest, {**turn.honest.content, METRICS: metrics})
    forged.metadata.__dict__["_group_id"] = "1000"
    return _delivered(turn.fleet.deliver(forged))


def two_replies(turn: Turn) -> str:
    """A poisoned reply, and a good one after it: only the first may count."""
    first = turn.fleet.deliver(REPLY_ATTACKS["nan"](turn.honest))
    second = turn.fleet.deliver(turn.honest)
    return f"the first: {_delivered(first)}; the second: {_delivered(second)}"


def honest(turn: Turn) -> str:
    """The model as it came: nothing that a server could object to."""
    return _delivered(turn.fleet.deliver(turn.honest))


# What needs the honest program's process to fail ("raise", "slow", "exit") has no place here.
_SENT = [name for name in REPLY_ATTACKS if name not in ("raise", "slow", "exit")]

BEHAVIOURS: dict[str, Behaviour] = {
    **{name: sends(REPLY_ATTACKS[name]) for name in _SENT},
    "huge-reply": huge_reply,
    "huge-part": huge_part,
    "repeated-chunks": repeated_chunks,
    "never-uploaded": never_uploaded,
    "drip-fed": drip_fed,
    "replayed": replayed,
    "forged-round": forged_round,
    "two-replies": two_replies,
    "honest": honest,
}


_DECLINED = Error(2, "this node does not train")
_HELD_SECONDS = 5.0


def attacks_server(attack: Callable[[Peer], str]) -> Behaviour:
    """Attack the SuperLink, and decline to train: a round need not wait for the deadline."""

    def behave(turn: Turn) -> str:
        said = attack(turn.peer)
        declined = turn.fleet.deliver(Message(_DECLINED, reply_to=turn.order))
        return f"{said}; its answer: {_delivered(declined)}"

    return behave


def holding(attack: Callable[[Peer], AbstractContextManager[str]]) -> Callable[[Peer], str]:
    """Hold what an attack holds for some seconds."""

    def hold(peer: Peer) -> str:
        with attack(peer) as said:
            time.sleep(_HELD_SECONDS)
        return said

    return hold


SERVER_ATTACKS: dict[str, Behaviour] = {
    **{name: attacks_server(attack) for name, attack in ATTACKS.items()},
    **{name: attacks_server(holding(attack)) for name, attack in HELD.items()},
}


def behaviour_of(name: str) -> Behaviour:
    """The behaviour of that name, or attacks on the server that `+` joins: one after the other in
    one turn. Raises KeyError for a name that there is not."""
    if "+" not in name:
        return {**BEHAVIOURS, **SERVER_ATTACKS}[name]
    attacks = [ATTACKS[each] for each in name.split("+")]
    return attacks_server(lambda peer: "; ".join(attack(peer) for attack in attacks))


def _with_content(reply: Message, content: dict[str, object]) -> Message:
    forged = copy.deepcopy(reply)
    forged.content = RecordDict(content)  # type: ignore[arg-type]
    return forged


def _in_pieces(turn: Turn, reply: Message) -> str:
    """Upload until the SuperLink will have no more."""
    announcement = turn.fleet.announce(reply)
    for uploaded, object_id in enumerate(announcement.missing):
        try:
            announcement.upload(object_id)
        except ObjectPushError:
            return f"refused after {uploaded} of {len(announcement.missing)} parts"
    return _delivered(announcement.taken)


def _delivered(taken: bool) -> str:
    return "delivered" if taken else "refused by the SuperLink"
