"""Free ports on the loopback interface."""

import contextlib
import socket

LOOPBACK = "127.0.0.1"


def free_loopback_ports(count: int) -> list[int]:
    """`count` different TCP ports that nobody listens on at 127.0.0.1.

    All are held at once while they are drawn, so they differ. They are released before the
    caller's programs bind them: whoever starts a program must be ready to draw again.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
