"""What runs on a cluster's nodes: honest SuperNodes first, then the Byzantine ones."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from blackthorn.attacks import get
from blackthorn.attacks.collusion import CollusionServer, Rendezvous
from blackthorn.attacks.collusion.client import ADDRESS_VARIABLE, SECONDS_VARIABLE
from blackthorn.attacks.flwr_clientapp import ATTACK_VARIABLE
from blackthorn.launch.federation.deployment import DeploymentError, Node
from blackthorn.launch.federation.members import OWN_CLIENTAPP, check_safeguards
from blackthorn.settings.config import ConfigError, RunConfig

BYZANTINE_PROGRAM = "blackthorn.attacks.flwr_clientapp:main"
ROGUE_PROGRAM = "blackthorn.attacks.rogue.__main__:main"
# Shares of a round's time: a colluder waits for the others, and for the whole exchange.
_PATIENCE, _EXCHANGE = 0.25, 0.5


def check_rogue(config: RunConfig, rogue: str) -> None:
    """ConfigError if `rogue` names no behaviours, or no node is Byzantine."""
    if not rogue:
        return
    # Knows the protocol of some of Flower's versions alone.
    from blackthorn.attacks.rogue.__main__ import check_behaviours

    if config.num_byzantine == 0:
        raise ConfigError(
            f"--rogue {rogue} has no node to run on: num-byzantine = 0, set at least --byzantine 1"
        )
    try:
        check_behaviours(rogue)
    except ValueError as error:
        raise ConfigError(f"--rogue: {error}") from error


@contextlib.contextmanager
def collusion(config: RunConfig, rogue: str) -> Iterator[dict[str, str]]:
    """The colluders' service while the run lasts, and the environment that leads nodes to it.

    Empty, and no service, where nobody is there to collude or nothing to collude about.
    """
    colludes = config.collusion and config.num_byzantine > 1 and not rogue
    if not colludes or get(config.attack).kind != "vector":
        yield {}
        return
    rendezvous = Rendezvous(config.num_byzantine, _PATIENCE * config.round_timeout)
    try:
        server = CollusionServer(rendezvous, config.num_byzantine)
    except OSError as error:
        raise DeploymentError(str(error)) from error
    seconds = _EXCHANGE * config.round_timeout
    with server:
        yield {ADDRESS_VARIABLE: server.address, SECONDS_VARIABLE: f"{seconds:g}"}


def kept_policies(
    config: RunConfig, policy: Path, data: Sequence[Path]
) -> dict[int, dict[str, str]]:
    """The node config of every honest client that keeps `policy`, with a ledger of its own beside
    it, which is there from now on. Raises ConfigError where policy, ledgers or data are not good.
    """
    path, kept = policy.resolve(), {}
    for client in range(config.num_clients - config.num_byzantine):
        ledger = path.with_suffix(f".client-{client}.ledger.json")
        known = check_safeguards(policy, ledger, data[client].resolve() if data else None)
        files = {"policy": str(path), "ledger": str(ledger), "data-dir": config.data_dir}
        kept[client] = {**files, "ledger-id": known}
    return kept


def cluster_nodes(
    config: RunConfig,
    data: Sequence[Path],
    rogue: str,
    accomplices: Mapping[str, str],
    policies: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
) -> list[Node]:
    """A node a client; the last `num-byzantine` run the Byzantine program or the rogue.

    `policies`: what `kept_policies` gives, of the clients that keep one.
    """
    honest = config.num_clients - config.num_byzantine
    nodes = []
    for client in range(config.num_clients):
        own = {"data-path": str(data[client].resolve())} if data else {}
        if client in policies:
            nodes.append(Node(config={**own, **policies[client]}, program=OWN_CLIENTAPP))
        elif client < honest:
            nodes.append(Node(config=own))
        elif rogue:
            arguments = ["--behaviour", rogue, "--seed", str(config.seed)]
            nodes.append(Node(rogue=ROGUE_PROGRAM, rogue_arguments=arguments))
        else:
            env = {ATTACK_VARIABLE: config.attack, **accomplices}
            nodes.append(Node(config=own, program=BYZANTINE_PROGRAM, env=env))
    return nodes
