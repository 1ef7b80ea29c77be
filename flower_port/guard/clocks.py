"""How far a client's clock is off, by the times that it signs; its answers count all the same.

Flower takes a time up to five minutes behind the server's and five seconds ahead of it; and a
client counts by its own clock what is left of the time that its message has.
"""

import importlib
import logging
import math
from datetime import UTC, datetime
from typing import Any

import grpc

from ..superlink_store import NEWS
from ..versions import NotThisFlower

# A clock that is as far ahead is named to both sides. (One behind is not told from a slow link.)
NOTED_SECONDS = 5.0
# In the head of an answer to a client whose clock is ahead: by how many seconds.
AHEAD_HEADER = "blackthorn-clock-ahead"
SET_IT = "set it, by NTP for example"
logger = logging.getLogger("flwr")

_INTERCEPTOR = "flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor"


def take_clocks_ahead() -> None:
    """A signed time may be as far ahead of our clock as behind it. Raises NotThisFlower."""
    module = vars(importlib.import_module(_INTERCEPTOR))
    if not {"MIN_TIMESTAMP_DIFF", "MAX_TIMESTAMP_DIFF"} <= module.keys():
        raise NotThisFlower(f"the installed flwr is changed: {_INTERCEPTOR} has other bounds")
    module["MIN_TIMESTAMP_DIFF"] = -_most_seconds()


def _most_seconds() -> float:
    return float(vars(importlib.import_module(_INTERCEPTOR))["MAX_TIMESTAMP_DIFF"])


def seconds_ahead(signed: bytes) -> float:
    """By how much a signed time is ahead of this clock, in seconds; negative where it is behind."""
    return (datetime.fromisoformat(signed.decode()) - datetime.now(UTC)).total_seconds()


def refusal(ahead: float) -> str:
    """What to say of a clock that is too far off."""
    side = "ahead of" if ahead > 0 else "behind"
    return (
        f"a clock that is {abs(ahead):.0f} s {side} the server's, where at most "
        f"{_most_seconds():.0f} s are taken: {SET_IT}"
    )


def tell_the_client(ahead: float, context: grpc.ServicerContext) -> None:
    """In the head of the answer, before it is made."""
    context.send_initial_metadata(((AHEAD_HEADER, f"{ahead:.0f}"),))


def tell_the_operator(name: str, ahead: float) -> None:
    """A line of the server's output."""
    what = f"the clock of {name} is {ahead:.0f} s ahead of the server's"
    logger.warning("%s%s: its operator should %s", NEWS, what, SET_IT)


def by_our_clock(metadata: Any) -> None:
    """Change an answer that was made in the future, by its maker's clock, to one made now.

    An answer's time of creation and its ttl add up to the end of its message's time, which was set
    by the server's clock: by that one alone is an answer late.
    """
    now, end = datetime.now(UTC).timestamp(), metadata.created_at + metadata.ttl
    if metadata.created_at > now and math.isfinite(end):
        metadata.created_at, metadata.ttl = now, end - now
