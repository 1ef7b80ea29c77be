"""A round's keys, what two clients derive from them, and who has signed them.

X25519, HKDF-SHA256, AES-256-GCM and ECDSA are the library `cryptography`'s. A key pair lives for
one round; what is derived is bound to the session, the purpose, both clients and both public keys.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey as NodeKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

# So many random bytes: os.urandom's, but in tests.
Entropy = Callable[[int], bytes]
KEY_BYTES = 32
_NONCE_BYTES = 12
_PROTOCOL = b"blackthorn secure aggregation 1"


def system_bytes(size: int) -> bytes:
    """So many bytes of the operating system's entropy, of which keys, seeds and shares are made."""
    return os.urandom(size)


class Refused(ValueError):
    """A client does not go on with a round, or a server cannot; the message is one line, and made
    of no secret."""


@dataclass(frozen=True)
class KeyPair:
    """An X25519 key pair, 32 bytes each."""

    private: bytes = field(repr=False)
    public: bytes

    @classmethod
    def generate(cls, entropy: Entropy) -> "KeyPair":
        """A new one."""
        return cls.of(entropy(KEY_BYTES))

    @classmethod
    def of(cls, private: bytes) -> "KeyPair":
        """The pair of a private key. Raises ValueError for one of another length."""
        key = X25519PrivateKey.from_private_bytes(private)
        return cls(private, key.public_key().public_bytes_raw())


@dataclass(frozen=True)
class Advertisement:
    """A client's public keys of a round: one under which shares are sealed for it, and one from
    which masks are made. `signature` of `statement`; empty: it has no registered key at hand."""

    client: int
    sealing: bytes
    masking: bytes
    signature: bytes = b""

    def statement(self, session: bytes) -> bytes:
        """What is signed."""
        return b"".join(
            (_PROTOCOL, session, self.client.to_bytes(8, "big"), self.sealing, self.masking)
        )

    def signed(self, session: bytes, key: EllipticCurvePrivateKey) -> "Advertisement":
        """The same with the signature by the client's registered key."""
        signature = key.sign(self.statement(session), ECDSA(SHA384()))
        return Advertisement(self.client, self.sealing, self.masking, signature)

    def is_signed_by(self, session: bytes, key: NodeKey) -> bool:
        """Whether the holder of `key` has signed these keys for this session."""
        try:
            key.verify(self.signature, self.statement(session), ECDSA(SHA384()))
        except InvalidSignature:
            return False
        return True


def shared_key(
    own: KeyPair, peer: bytes, purpose: str, session: bytes, pair: tuple[int, int]
) -> bytes:
    """32 bytes that the holders of both keys can derive, for one purpose in one session.

    `pair`: the ids of both clients, in any order. Raises Refused for a public key that is none, or
    of small order.
    """
    try:
        key = X25519PrivateKey.from_private_bytes(own.private)
        secret = key.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise Refused("a public key is no key to agree by") from None
    low, high = sorted(pair)
    first, second = sorted((own.public, peer))
    info = (_PROTOCOL, purpose.encode(), low.to_bytes(8, "big"), high.to_bytes(8, "big"))
    return HKDF(SHA256(), KEY_BYTES, session, b"".join((*info, first, second))).derive(secret)


def seal(key: bytes, plain: bytes, bound_to: bytes, entropy: Entropy) -> bytes:
    """`plain` under AES-256-GCM with a random nonce in front, authenticated with `bound_to`."""
    nonce = entropy(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plain, bound_to)


def unseal(key: bytes, sealed: bytes, bound_to: bytes) -> bytes:
    """What was sealed. Raises Refused where it was not by this key, for this purpose, or is cut."""
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], bound_to)
    except (InvalidTag, ValueError):
        raise Refused("what is sealed does not open: it was changed, or is another's") from None
