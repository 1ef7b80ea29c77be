"""Updates on the wire: a header, then pieces of a size that gRPC takes without being told."""

from collections.abc import Iterator
from typing import TypeVar

from .collusion_pb2 import Header, Part
from .rendezvous import Update

METHOD = "/blackthorn.collusion.Collusion/Share"
SERVICE = "blackthorn.collusion.Collusion"
DTYPES = ("float32", "float64")
_PIECE_BYTES = 2**20

P = TypeVar("P", bound=Part)


class MalformedParts(ValueError):
    """A stream of parts that is not headers with their updates."""


def to_parts(run: str, server_round: int, client: int, update: Update) -> Iterator[Part]:
    """A header and the update's bytes in pieces of a mebibyte."""
    yield Part(
        header=Header(
            run=run,
            round=server_round,
            client=client,
            dtype=update.dtype,
            num_bytes=len(update.data),
        )
    )
    view = memoryview(update.data)
    for start in range(0, len(view), _PIECE_BYTES):
        yield Part(data=bytes(view[start : start + _PIECE_BYTES]))


def from_parts(parts: Iterator[P], max_bytes: int) -> Iterator[tuple[Header, Update]]:
    """The headers and updates in a stream of parts, as they are complete.

    Raises MalformedParts for anything else, and for an update of more than `max_bytes`.
    """
    for part in parts:
        if part.WhichOneof("part") != "header":
            raise MalformedParts("the stream has data without a header")
        header = part.header
        if header.dtype not in DTYPES:
            raise MalformedParts(f"dtype is {header.dtype[:20]!r}; allowed are float32, float64")
        if header.num_bytes > max_bytes:
            raise MalformedParts(
                f"the update has {header.num_bytes} bytes; allowed are at most {max_bytes}"
            )
        yield header, Update(header.dtype, _read_data(parts, header.num_bytes))


def _read_data(parts: Iterator[P], num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = next(parts, None)
        if part is None or part.WhichOneof("part") != "data" or not part.data:
            raise MalformedParts(f"the stream ends after {len(data)} of {num_bytes} bytes")
        data += part.data
    if len(data) > num_bytes:
        raise MalformedParts(f"the stream has more than the {num_bytes} bytes it announced")
    return bytes(data)
