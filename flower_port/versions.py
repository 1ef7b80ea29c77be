"""Which versions of Flower this package knows the insides of."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

# From, and below which. Where every hop is gRPC: all that this package knows is known of these.
GRPC = (1, 33), (1, 35)
# Where every hop is HTTP: strategies and ClientApps work there, the guard and the commands that
# start Flower's programs do not.
HTTP = (1, 42), (1, 43)

Versions = tuple[tuple[int, int], tuple[int, int]]


class NotThisFlower(RuntimeError):
    """The installed Flower is built otherwise than is known; the message says what to do."""


def installed() -> str:
    """The version of Flower that is installed."""
    return importlib.metadata.version("flwr")


def is_one_of(versions: Versions) -> bool:
    """Whether the installed Flower is one of these."""
    return versions[0] <= tuple(int(part) for part in installed().split(".")[:2]) < versions[1]


def requirement(versions: Versions) -> str:
    """What pip understands."""
    low, high = (".".join(map(str, bound)) for bound in versions)
    return f"flwr>={low},<{high}"


def check_grpc() -> None:
    """NotThisFlower unless the installed Flower is one with gRPC on every hop."""
    if not is_one_of(GRPC):
        raise NotThisFlower(
            f"flwr {installed()} is installed, whose programs are not known here: install "
            f'{requirement(GRPC)} (pip install "blackthorn[app]")'
        )


@contextmanager
def with_grpc() -> Iterator[None]:
    """Around imports of what only these versions have: NotThisFlower for another one."""
    check_grpc()
    yield
