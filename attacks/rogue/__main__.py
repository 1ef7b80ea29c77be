"""`python -m blackthorn.attacks.rogue`: the rogue node as a program.

It connects to loopback, or to a host that `--allow` names once more.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import Error, Message, MetricRecord, RecordDict

from blackthorn.flower_port.fleet import (
    Fleet,
    Keys,
    ObjectPullError,
    ObjectPushError,
    connected,
)
from blackthorn.flower_port.guard.connections import is_loopback
from blackthorn.randomness import Stream, generator_of
from blackthorn.wire import CLIENT_ID, METRICS, NUM_EXAMPLES, SERVER_ROUND

from ..round_config import honest_reply, number, round_config
from .behaviours import BEHAVIOURS, SERVER_ATTACKS, Turn, behaviour_of
from .server_attacks import Peer

_POLL_SECONDS = 0.1
_RANDOM = "random"
_ALL = (*BEHAVIOURS, *SERVER_ATTACKS)
_JOINED = "attacks on the server that + joins (many-ids+pings)"
_NO_EXAMPLES = Error(2, "this node has no held-out examples to evaluate on")

logger = logging.getLogger("rogue")


class Rogue:
    """Answers questions like an honest client, and train messages with a behaviour each."""

    def __init__(
        self,
        fleet: Fleet,
        peer: Peer,
        client_id: int,
        num_examples: int,
        choose: Callable[[int], str],
    ) -> None:
        """`choose` maps a round to the name of its behaviour."""
        self._fleet = fleet
        self._peer = peer
        self._client_id = client_id
        self._num_examples = num_examples
        self._choose = choose
        self._past: Message | None = None

    def answer(self, message: Message) -> None:
        """Enrol, decline to evaluate, or misbehave."""
        kind = message.metadata.message_type.partition(".")[0]
        if kind == "train":
            self._misbehave(message)
        elif kind == "query":
            metrics = MetricRecord({CLIENT_ID: self._client_id, NUM_EXAMPLES: self._num_examples})
            self._fleet.deliver(Message(RecordDict({METRICS: metrics}), reply_to=message))
        else:
            self._fleet.deliver(Message(_NO_EXAMPLES, reply_to=message))

    def _misbehave(self, order: Message) -> None:
        server_round = int(number(round_config(order), SERVER_ROUND, 0))
        name = self._choose(server_round)
        reply = honest_reply(order, self._num_examples)
        self._peer.order = order.metadata
        outcome = behaviour_of(name)(Turn(self._fleet, order, reply, self._past, self._peer))
        logger.info("round %d: %s: %s", server_round, name, outcome)
        self._past = self._past or reply


def in_turn(names: Sequence[str]) -> Callable[[int], str]:
    """Round t (from 1) -> the name at place t, from the start again after the last."""
    return lambda server_round: names[(server_round - 1) % len(names)]


def at_random(seed: int) -> Callable[[int], str]:
    """Round -> a behaviour drawn with Philox keyed by (seed, round)."""
    names = sorted(BEHAVIOURS)

    def draw(server_round: int) -> str:
        return names[generator_of(Stream.ROGUE, seed, server_round).integers(len(names))]

    return draw


def serve(rogue: Rogue, fleet: Fleet) -> None:
    """Answer message after message. Ends with grpc.RpcError when the SuperLink is gone."""
    while True:
        try:
            message = fleet.receive()
            if message is not None:
                rogue.answer(message)
        except (ObjectPullError, ObjectPushError) as error:
            logger.info("%s", error)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED):
                raise
            logger.info("the SuperLink says %s: %s", error.code().name, error.details())
        time.sleep(_POLL_SECONDS)


def check_behaviours(text: str) -> list[str]:
    """The names in `text`, separated by commas; ValueError for one that there is not."""
    names = text.split(",")
    for name in names:
        try:
            _ = names == [_RANDOM] or behaviour_of(name)
        except KeyError:
            allowed = ", ".join([*_ALL, f"{_JOINED}, and {_RANDOM} by itself"])
            raise ValueError(f"behaviour is {name!r}; allowed are {allowed}") from None
    return names


def check_address(address: str, allowed: Sequence[str]) -> None:
    """ValueError unless `address` is HOST:PORT of loopback or of a host in `allowed`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ValueError(f"--superlink is {address!r}; allowed are HOST:PORT")
    if host not in allowed and not is_loopback(host):
        raise ValueError(
            f"--superlink is {address!r}; allowed are loopback and the hosts that --allow names: "
            f"add --allow {host} if that SuperLink is yours"
        )


def _keys(file: Path) -> Keys:
    """The pair of an OpenSSH private key. Raises ValueError."""
    private = load_ssh_private_key(file.read_bytes(), None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError(f"--key {file} is not an ECDSA key")
    return private, private.public_key()


def _public_key(file: Path) -> bytes:
    """The PEM of an OpenSSH public key."""
    public = load_ssh_public_key(file.read_bytes())
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rogue", description=__doc__)
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="Fleet API.")
    parser.add_argument("--client", type=int, required=True, help="The client id it enrols with.")
    parser.add_argument("--num-examples", type=int, default=1, help="What it says it holds.")
    parser.add_argument(
        "--behaviour",
        default=_RANDOM,
        help=f"Names separated by commas, one a round in turn, or {_RANDOM}. There are: "
        + ", ".join(_ALL)
        + f", and {_JOINED}",
    )
    parser.add_argument("--seed", type=int, default=0, help=f"Of {_RANDOM} behaviour.")
    parser.add_argument("--allow", action="append", default=[], metavar="HOST")
    parser.add_argument("--key", type=Path, help="Registered private key; default: a new one.")
    parser.add_argument("--victim", type=Path, help="Another client's public key.")
    parser.add_argument("--root-certificates", type=Path, help="PEM file; without it, no TLS.")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM, or until the SuperLink is gone; exit code 2 for wrong arguments."""
    options = _options(arguments)
    try:
        check_address(options.superlink, options.allow)
        names = check_behaviours(options.behaviour)
        pem = options.root_certificates and options.root_certificates.read_bytes()
        keys = _keys(options.key) if options.key else None
        victim = _public_key(options.victim) if options.victim else b""
    except (ValueError, OSError) as error:
        print(f"rogue: {error}", file=sys.stderr)
        sys.exit(2)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    choose = at_random(options.seed) if names == [_RANDOM] else in_turn(names)
    try:
        with connected(options.superlink, pem, keys) as fleet:
            peer = Peer(options.superlink, pem, keys, fleet.node_id, victim=victim)
            logger.info("node %d enrols as client %d", fleet.node_id, options.client)
            serve(Rogue(fleet, peer, options.client, options.num_examples, choose), fleet)
    except RuntimeError:
        # So Flower fails to sign off a node whose last heartbeat was refused. It leaves the
        # connection open then, for which gRPC would wait for ever as the interpreter ends.
        logger.exception("ends without signing off")
        logging.shutdown()
        os._exit(1)


if __name__ == "__main__":
    main()
