"""How an operator's commands reach the server: options they share, and the checked connection."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blackthorn.launch.federation.addresses import Address, check_insecure, parse_address
from blackthorn.settings.config import ConfigError

if TYPE_CHECKING:
    import grpc

    from blackthorn.flower_port.control_api import ControlApi

Server = Annotated[str, typer.Option(metavar="NAME:PORT", help="The server's port for operators.")]
Ca = Annotated[Path | None, typer.Option(help="The federation's ca.crt.")]
Certs = Annotated[
    Path | None, typer.Option(help="Folder of `blackthorn certs`: its ca.crt and clients' names.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS, no authentication.")]
IKnow = Annotated[
    bool, typer.Option("--i-know", help="Allow --insecure on other addresses than loopback.")
]
DEFAULT_SERVER = "localhost:9093"


@dataclass(frozen=True)
class Connection:
    """The Control API's address, and the certificate that vouches for it (None: no TLS)."""

    address: Address
    ca: Path | None

    @contextmanager
    def open(self) -> "Iterator[ControlApi]":
        """The Control API; RuntimeError with one line if it cannot be reached as configured."""
        import grpc

        from blackthorn.flower_port.control_api import ControlApi
        from blackthorn.launch.federation.probe import probe
        from blackthorn.launch.processes.supervisor import NotYet

        # As gRPC is used for operators: through no proxy.
        probe(self.address, self.ca, proxied=False)
        control = ControlApi(str(self.address), self.ca.read_bytes() if self.ca else None)
        try:
            yield control
        except grpc.RpcError as error:
            raise NotYet(f"{self.address} {_failed(error.code(), error.details())}") from error
        finally:
            control.close()


def _failed(code: "grpc.StatusCode", details: str) -> str:
    """What to say of a server that a call failed at."""
    words = " ".join(details.split())
    if code.name == "UNIMPLEMENTED":
        return "is not the operators' port of a blackthorn server (9093 by default)"
    if code.name == "UNAVAILABLE" and not words.startswith("the server"):
        return "stopped answering: is it being started again? Give the command once more"
    if code.name == "UNAVAILABLE":
        return f"does not answer: {words}; give the command once more"
    if code.name == "DEADLINE_EXCEEDED":
        return (
            "did not answer in time: it is overloaded, or its database is locked; give the "
            "command once more, and see its state/logs"
        )
    return f"failed in a call ({code.name}: {words}); see its state/logs/superlink.log"


def connection(server: str, ca: Path | None, insecure: bool, i_know: bool) -> Connection:
    """Check the options. Raises ConfigError with one line."""
    address = parse_address(server, "--server", 9093)
    if insecure == (ca is not None):
        raise ConfigError("give either --ca ca.crt (or --certs DIR), or --insecure")
    if insecure:
        check_insecure(address.host, i_know)
    if ca is not None and not ca.is_file():
        raise ConfigError(f"--ca {ca} does not exist")
    if ca is not None:
        from blackthorn.launch.federation.probe import check_authority

        check_authority(ca)
    return Connection(address, ca.resolve() if ca else None)


def make_folder(folder: Path, option: str) -> None:
    """Make the folder, readable by its owner only. ConfigError where none can be made or used."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} cannot be written to")
