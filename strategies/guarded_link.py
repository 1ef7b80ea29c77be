"""What the guard of the SuperLink says of the nodes' keys: whose they are, and what it refused.

The guard answers on the ServerApps' own port. Other SuperLinks do not know the call: then nothing
is known of any key, and nothing was refused.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from blackthorn.flower_port.transports import Transport

from .screening import one_line

logger = logging.getLogger("blackthorn")


@dataclass(frozen=True)
class KeyHolder:
    """What an operator said of a node's key; None: nothing.

    `client_id` is the only client that it may be, `max_examples` the most that it may declare.
    """

    key: str
    client_id: int | None = None
    max_examples: int | None = None


@dataclass(frozen=True)
class Refusal:
    """What the SuperLink refused `count` times in a round.

    `key` is the sender's registered name or fingerprint, `client` the client it holds (None:
    none). `barred`: the key takes no more part until its operator lifts that.
    """

    key: str
    client: int | None
    what: str
    count: int
    barred: bool = False


class GuardedLink:
    """Asks a run's SuperLink. What was refused before the first question is not this run's."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], int] | None = None
        # Whether no node learns what another sends: nobody can reach the link, or it has a guard.
        self.keeps_apart = False

    def holders(self, transport: Transport) -> dict[int, KeyHolder]:
        """The keys' holders by their nodes' ids."""
        nodes = transport.guard_report().get("nodes", {})
        return {int(node): KeyHolder(**holder) for node, holder in nodes.items()}

    def refusals(self, transport: Transport, clients: Mapping[int, int]) -> list[Refusal]:
        """What was refused since the last question; `clients` are the clients by their nodes."""
        first, before = self._counted is None, self._counted or {}
        counted, found = {}, []
        report = transport.guard_report()
        self.keeps_apart = self.keeps_apart or bool(report) or transport.is_closed
        for entry in report.get("refusals", []):
            name = entry["key"], entry["kind"]
            counted[name] = entry["count"]
            # A SuperLink that was started again counts from the beginning.
            already = before.get(name, 0) if before.get(name, 0) <= entry["count"] else 0
            new = entry["count"] - already
            if new and not first:
                client, what = clients.get(entry["node"]), one_line(entry["last"])
                found.append(Refusal(entry["key"], client, what, new, entry["barred"]))
        self._counted = counted
        for refusal in found:
            logger.info("the SuperLink refused %s: %s", refusal.key, refusal.what)
        return found
