"""HTTP/2 by hand (RFC 9113, RFC 7541), for requests that no gRPC library would make."""

import base64
import contextlib
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _CONTINUATION = 0, 1, 3, 4, 6, 9
_END_STREAM, _END_HEADERS = 1, 4
_CANCEL = 8
_CONNECT_SECONDS = 10.0

Metadata = Iterable[tuple[str, str | bytes]]


class Connection:
    """One HTTP/2 connection, on which nothing is read unless it is asked for."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._next = 1
        stream.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))

    def begin(self, method: str, metadata: Metadata = (), whole: bool = True) -> int:
        """Send a gRPC request's headers, and nothing else; returns the stream's number.

        Where they are not `whole` the other side waits for more.
        """
        number, self._next = self._next, self._next + 2
        headers = [
            *((":method", "POST"), (":scheme", "https"), (":path", method)),
            *((":authority", "rogue"), ("te", "trailers"), ("content-type", "application/grpc")),
        ]
        block = b"".join(_field(n, v) for n, v in [*headers, *metadata])
        self._stream.sendall(_frame(_HEADERS, _END_HEADERS if whole else 0, number, block))
        return number

    def more_headers(self, stream: int, metadata: Metadata) -> None:
        """Some more headers of a request whose headers are not whole, and still are not."""
        block = b"".join(_field(n, v) for n, v in metadata)
        self._stream.sendall(_frame(_CONTINUATION, 0, stream, block))

    def send(self, stream: int, data: bytes, end: bool = False) -> None:
        """Some bytes of a request's body."""
        self._stream.sendall(_frame(_DATA, _END_STREAM if end else 0, stream, data))

    def reset(self, stream: int) -> None:
        """Take a request back."""
        self._stream.sendall(_frame(_RST_STREAM, 0, stream, struct.pack("!I", _CANCEL)))

    def ping(self) -> None:
        """A PING frame with eight bytes, which the other side has to acknowledge."""
        self._stream.sendall(_frame(_PING, 0, 0, bytes(8)))

    def closed_within(self, seconds: float) -> bool:
        """Whether the other side closes the connection; what it sends until then is read."""
        self._stream.settimeout(seconds)
        try:
            while self._stream.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


def message(body: bytes) -> bytes:
    """A gRPC message: not compressed, its length in four bytes."""
    return struct.pack("!BI", 0, len(body)) + body


def tcp(address: str) -> socket.socket:
    """A TCP connection to HOST:PORT."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS)


@contextlib.contextmanager
def connected(address: str, root_certificates: bytes | None) -> Iterator[Connection]:
    """A connection, over TLS where there are certificates to trust."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(tcp(address))
        if root_certificates is not None:
            context = ssl.create_default_context(cadata=root_certificates.decode())
            context.set_alpn_protocols(["h2"])
            host = address.rpartition(":")[0].strip("[]")
            stream = stack.enter_context(context.wrap_socket(stream, server_hostname=host))
        yield Connection(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _field(name: str, value: str | bytes) -> bytes:
    """A header field, literally and without an index."""
    if isinstance(value, bytes):
        value = base64.b64encode(value).decode().rstrip("=")
    return b"\x00" + _text(name.encode()) + _text(value.encode())


def _text(text: bytes) -> bytes:
    """A string's length with a prefix of seven bits, and the string."""
    left = len(text) - 127
    if left < 0:
        return bytes([len(text)]) + text
    length = bytearray([127])
    while left >= 128:
        length.append(left % 128 + 128)
        left //= 128
    return bytes([*length, left]) + text
