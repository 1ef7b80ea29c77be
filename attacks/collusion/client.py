"""A corrupt client's side of the collusion service."""

import os
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch
from torch import Tensor

from .collusion_pb2 import Part
from .parts import METHOD, MalformedParts, from_parts, to_parts
from .rendezvous import Update

ADDRESS_VARIABLE = "BLACKTHORN_COLLUSION"
CERTIFICATES_VARIABLE = "BLACKTHORN_COLLUSION_CA"
SECONDS_VARIABLE = "BLACKTHORN_COLLUSION_SECONDS"
_LONGEST_SECONDS = 60.0


class CollusionFailed(RuntimeError):
    """The service is away, too slow, or makes no sense; the message says which."""


@dataclass(frozen=True)
class Accomplices:
    """The other corrupt clients, through the service at `address`.

    `root_certificates` (PEM) switch TLS on; `timeout` bounds an exchange, in seconds.
    """

    address: str
    root_certificates: bytes | None = None
    timeout: float = _LONGEST_SECONDS

    @classmethod
    def from_environment(cls) -> "Accomplices | None":
        """What the node's operator has set: BLACKTHORN_COLLUSION=host:port, else None.

        BLACKTHORN_COLLUSION_CA names a PEM file, BLACKTHORN_COLLUSION_SECONDS the timeout.
        """
        address = os.environ.get(ADDRESS_VARIABLE)
        if not address:
            return None
        pem = os.environ.get(CERTIFICATES_VARIABLE)
        seconds = float(os.environ.get(SECONDS_VARIABLE) or _LONGEST_SECONDS)
        return cls(address, Path(pem).read_bytes() if pem else None, seconds)

    def share(self, run: str, server_round: int, client: int, update: Tensor) -> tuple[Tensor, int]:
        """Show `update` [d] to the round's other colluders, and see theirs.

        Returns the updates [b, d] of all of them by ascending client id, in the dtype of
        `update`, and the row that is one's own. Raises CollusionFailed.
        """
        own = update.numpy()
        post = Update(str(own.dtype), own.astype(own.dtype.newbyteorder("<")).tobytes())
        rows: dict[int, np.ndarray] = {}
        try:
            with self._channel() as channel:
                call = channel.stream_stream(
                    METHOD,
                    request_serializer=Part.SerializeToString,
                    response_deserializer=Part.FromString,
                )
                answers = call(to_parts(run, server_round, client, post), timeout=self.timeout)
                for header, shared in from_parts(answers, len(post.data)):
                    rows[header.client] = _numbers(shared, own)
        except grpc.RpcError as error:
            raise CollusionFailed(
                f"the collusion service at {self.address} fails: "
                f"{error.code().name} {error.details()}"
            ) from error
        except MalformedParts as error:
            raise CollusionFailed(f"the collusion service makes no sense: {error}") from error
        if client not in rows:
            raise CollusionFailed("the collusion service has lost this client's update")
        clients = sorted(rows)
        stacked = torch.from_numpy(np.stack([rows[each] for each in clients]))
        return stacked, clients.index(client)

    def _channel(self) -> grpc.Channel:
        # gRPC would send even loopback traffic through the proxy that http_proxy names.
        options = [("grpc.enable_http_proxy", 0)]
        if self.root_certificates is None:
            return grpc.insecure_channel(self.address, options=options)
        credentials = grpc.ssl_channel_credentials(self.root_certificates)
        return grpc.secure_channel(self.address, credentials, options=options)


def _numbers(shared: Update, own: np.ndarray) -> np.ndarray:
    """The shared numbers; MalformedParts unless they are as many, and of the same kind, as own."""
    if shared.dtype != str(own.dtype) or len(shared.data) != own.nbytes:
        raise MalformedParts(f"{len(shared.data)} bytes of {shared.dtype} beside {own.nbytes} own")
    return np.frombuffer(shared.data, own.dtype.newbyteorder("<")).astype(own.dtype)
