"""With what code a request of a registered key is refused, so that an honest node goes on.

A SuperNode does with each call something else, code by code; here is what of that can be relied on.
"""

import grpc

CONFIRMS = "ConfirmMessageReceived"
_HEARTBEAT = "SendNodeHeartbeat"
# Calls by which a node takes the rest of a message that it has begun to take.
_TAKING = "PullObject", CONFIRMS


def denied(method: str) -> grpc.StatusCode:
    """The code of a request that is not taken, now or ever.

    Denied the rest of a message by PERMISSION_DENIED, a SuperNode would keep what it has of it,
    have it answered, and from then on be one message late. By another code it lets go of it.
    """
    codes = grpc.StatusCode
    return codes.FAILED_PRECONDITION if method in _TAKING else codes.PERMISSION_DENIED


def failed(method: str, code: grpc.StatusCode) -> grpc.StatusCode:
    """The code of a request that would be good at another time: `code`, but for heartbeats.

    By any code but UNAVAILABLE a SuperNode's heartbeat would be its last: the thread that sends
    them dies of it, and a node that asks and answers as before is taken for dead.
    """
    return grpc.StatusCode.UNAVAILABLE if method == _HEARTBEAT else code
