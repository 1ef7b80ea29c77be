"""The gRPC service around a `Rendezvous`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc

from .collusion_pb2 import Part
from .parts import SERVICE, from_parts, to_parts
from .rendezvous import Rendezvous

# An update of 10^8 float32 numbers, and a little.
MAX_UPDATE_BYTES = 2**29
_GRACE_SECONDS = 1.0


class CollusionServer:
    """Serves a rendezvous at `address` ("host:port", port 0 for a free one) in a `with` block.

    `certificate` and `key` (PEM) switch TLS on. OSError if the address cannot be bound.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        num_colluders: int,
        address: str = "127.0.0.1:0",
        certificate: bytes | None = None,
        key: bytes | None = None,
    ) -> None:
        self._rendezvous = rendezvous
        # Every colluder holds one thread while it waits, and once more if it was restarted.
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=2 * num_colluders + 2),
            options=[("grpc.so_reuseport", 0)],
        )
        share = grpc.stream_stream_rpc_method_handler(
            self._share,
            request_deserializer=Part.FromString,
            response_serializer=Part.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Share": share})
        self._server.add_generic_rpc_handlers((handler,))
        try:
            if certificate is not None and key is not None:
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                port = self._server.add_secure_port(address, credentials)
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"the collusion service cannot listen at {address}") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._server.stop(_GRACE_SECONDS).wait(2 * _GRACE_SECONDS)

    def wait(self) -> None:
        """Until the server is stopped."""
        self._server.wait_for_termination()

    def _share(self, parts: Iterator[Part], context: grpc.ServicerContext) -> Iterator[Part]:
        try:
            for header, update in from_parts(parts, MAX_UPDATE_BYTES):
                known = self._rendezvous.share(header.run, header.round, header.client, update)
                for client, shared in known.items():
                    yield from to_parts(header.run, header.round, client, shared)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
