"""Whose keys a client believes: its own registered key, and its own list of all members' keys.

The node config names both, as files of the client's machine. Flower's SuperNode does not lend its
key to the ClientApp, which runs on the same machine under the same operator, and reads the same
file. Without a list a client has no more than the server's word for whose keys it is given.
"""

from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from blackthorn.secure_aggregation.key_agreement import Refused
from blackthorn.settings.config import ConfigError

from .node_data import named_file

# The node config's keys.
IDENTITY_KEY, MEMBERS = "identity-key", "members"

NodeConfig = Mapping[str, bool | int | float | str]


def own_key(node_config: NodeConfig) -> EllipticCurvePrivateKey | None:
    """The key that signs; None where the node config names none. Raises Refused for no such key."""
    path = _named(node_config, IDENTITY_KEY)
    if path is None:
        return None
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, TypeError, ValueError, UnsupportedAlgorithm):
        raise Refused("this client's registered key cannot be read") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise Refused("this client's registered key is none of an elliptic curve")
    return key


def registered_keys(node_config: NodeConfig) -> dict[int, EllipticCurvePublicKey] | None:
    """The members' keys by client; None where the node config names no list. Raises Refused where
    it cannot be used."""
    path = _named(node_config, MEMBERS)
    if path is None:
        return None
    try:
        return read_members(path)
    except ConfigError:
        raise Refused("this client's list of members cannot be used") from None


def read_members(path: Path) -> dict[int, EllipticCurvePublicKey]:
    """A list of members: a line each, the client's number and its public key as `ssh-keygen` writes
    it. Raises ConfigError, one line, that names the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"members {path} cannot be read: {error}") from None
    members: dict[int, EllipticCurvePublicKey] = {}
    for at, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        number, _, words = line.strip().partition(" ")
        try:
            key = load_ssh_public_key(words.strip().encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not number.isdecimal() or not isinstance(key, EllipticCurvePublicKey):
            raise ConfigError(
                f"members {path}, line {at}: a client's number and an ECDSA public key are needed"
            )
        if int(number) in members:
            raise ConfigError(f"members {path}, line {at}: client {int(number)} is there twice")
        members[int(number)] = key
    return members


def _named(node_config: NodeConfig, key: str) -> Path | None:
    try:
        return named_file(node_config, key)
    except ConfigError as error:
        raise Refused(str(error)) from None
