"""What a client answers at all: its operator's policy and its own ledger are asked first."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from blackthorn.settings.config import ConfigError, RunConfig, make_config

from .client_ledger import ClientLedger, LedgerUnusable, Sent, tell_exactly
from .configured_rule import check_rule
from .disclosure import PublicRefusal, check_claim, check_code, level
from .messages import claims_clients, enrolment_refusal, read_round
from .node_data import LEDGER, LEDGER_ID, POLICY, named_file, node_client_id
from .policy import Policy, PolicyRefusal, read_policy, round_cost

logger = logging.getLogger("blackthorn.clients")

NodeConfig = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Safeguards:
    """A client's policy and ledger; without a policy the ledger counts, and nothing is refused."""

    policy: Policy | None
    ledger: ClientLedger

    @classmethod
    def of(cls, node_config: NodeConfig) -> "Safeguards | None":
        """Those that the node's config names; None where it names neither.

        Raises ConfigError for a policy that cannot be read, or that has no ledger, and for paths
        that are not whole.
        """
        policy, ledger = (named_file(node_config, key) for key in (POLICY, LEDGER))
        if ledger is None:
            if policy is not None:
                raise ConfigError(f"policy {policy} needs a ledger: name one in the node's config")
            return None
        data = str(node_config.get("data-path", ""))
        read = None if policy is None else read_policy(policy, data)
        kept = ClientLedger(ledger, str(node_config.get(LEDGER_ID, "")))
        if kept.begins_anew:
            logger.warning(kept.begins_anew)
        return cls(read, kept)

    def admit_other(self, config: RunConfig) -> None:
        """Count that a run is answered beside its rounds, where no claim keeps figures of the
        examples out of the answer.

        Raises PolicyRefusal, and counts nothing, where no round of it is allowed (any more).
        """
        sent = self.ledger.read()
        if self.policy is not None:
            self.policy.check_run(config)
            self.policy.check_sent(sent.rounds + 1, *sent.costs())
        if level(config) == "none" and not sent.told_exactly:
            self.ledger.change(tell_exactly)

    def admit(self, config: RunConfig, message: Message, run_id: int) -> None:
        """Count the reply to a train message, which may be made when this returns.

        Raises PolicyRefusal, and counts nothing, where it may not.
        """
        request, policy = read_round(message), self.policy
        if policy is not None:
            policy.check_run(config)
        check_rule(config, request)
        cost = round_cost(config, request)

        def count(sent: Sent) -> None:
            last = sent.last_round.get(str(run_id), 0)
            sent.add(run_id, request.server_round, cost.local, cost.sample)
            if policy is not None:
                policy.check_round(config, request.server_round, last, cost)
                policy.check_sent(sent.rounds, *sent.costs())

        self.ledger.change(count)


def permitting(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: the app sees a message only when its answer is allowed and, of a train message,
    counted on disk.

    The server is told which rule refused, and the client's log the whole; neither hangs on the
    examples. Without policy and ledger, as in a simulation, every message passes.
    """
    config = make_config(context.run_config)
    kind = message.metadata.message_type.partition(".")[0]
    try:
        check_code(message)
        check_claim(config, claims_clients(message))
        safeguards = Safeguards.of(context.node_config)
        if safeguards is not None and kind == "train":
            safeguards.admit(config, message, context.run_id)
        elif safeguards is not None:
            safeguards.admit_other(config)
    except (ConfigError, LedgerUnusable, PublicRefusal) as refusal:
        return _refuse(message, context, kind, refusal)
    return call_next(message, context)


def _refuse(message: Message, context: Context, kind: str, refusal: ValueError) -> Message:
    """Say all of it here, and to the server as much as it may know."""
    client_id = node_client_id(context.node_config)
    told = in_full = str(refusal)
    if isinstance(refusal, PolicyRefusal):
        in_full = refusal.in_full
    elif not isinstance(refusal, PublicRefusal):
        told = "the client's policy or ledger cannot be used"
    does_not = "cannot take part" if kind == "query" else f"does not {kind}"
    logger.error("client %d %s in run %d: %s", client_id, does_not, context.run_id, in_full)
    if kind == "query":
        return enrolment_refusal(message, client_id, told)
    raise PublicRefusal(told) from None
