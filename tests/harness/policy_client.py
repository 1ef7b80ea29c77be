"""A client with a policy and a ledger in a folder, and a server that asks it for what it likes."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from blackthorn.client_app import clientapp as client_app
from blackthorn.client_app.client_ledger import ClientLedger, Sent
from blackthorn.settings.config import RunConfig, make_config, to_mapping
from blackthorn.strategies.array_codec import encode
from blackthorn.strategies.attestation import (
    SentRule,
)
from blackthorn.tasks.problem import load_problem
from blackthorn.wire import RULE

COHORT = 4
# Noise at the clients, z left to the server: the recipe has a budget, not a multiplier.
AT_CLIENTS: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "clip-norm": 1.0,
    "noise-location": "client",
    "epsilon": 8.0,
    "num-clients": COHORT,
    "num-server-rounds": 50,
    "model": "logistic",
    "local-steps": 1,
    "batch-size": 8,
}
DP_SGD: dict[str, Any] = {
    "algorithm": "gfedavg",
    "local-dp-sgd": True,
    "dp-sgd-noise-multiplier": 2.0,
    "dp-sgd-sample-rate": 0.1,
    "num-clients": COHORT,
    "num-server-rounds": 50,
    "model": "logistic",
    "local-steps": 3,
    "batch-size": 8,
}


def run_config(values: dict[str, Any], **changes: Any) -> RunConfig:
    return make_config({**values, **{key.replace("_", "-"): v for key, v in changes.items()}})


class Client:
    """A client with its files in `folder`; every message meets a fresh context, as after a
    restart of everything but the files."""

    def __init__(self, folder: Path, policy: str | None = None, ledger: bool = True) -> None:
        self.ledger = folder / "client" / "ledger.json"
        self.node: dict[str, Any] = {"client-id": 3}
        if ledger:
            self.node["ledger"] = str(self.ledger)
        if policy is not None:
            (folder / "policy.toml").write_text(policy)
            self.node["policy"] = str(folder / "policy.toml")

    def send(self, config: RunConfig, message: Message, run_id: int = 1) -> Message:
        context = Context(run_id, 5, self.node, RecordDict(), to_mapping(config))
        return client_app.app(message, context)

    def train(self, config: RunConfig, server_round: int, run_id: int = 1, **asked: Any) -> Message:
        return self.send(config, train_message(config, server_round, **asked), run_id)

    def refusal(self, config: RunConfig, server_round: int, run_id: int = 1, **asked: Any) -> str:
        """What the server is told; nothing may have been counted."""
        before = self.sent()
        with pytest.raises(ValueError) as refused:
            self.train(config, server_round, run_id, **asked)
        assert self.sent() == before
        assert "\n" not in str(refused.value)
        return str(refused.value)

    def sent(self) -> Sent:
        return ClientLedger(self.ledger).read()


def train_message(
    config: RunConfig,
    server_round: int,
    z: float = 4.0,
    shares: int = COHORT,
    local_lr: float | None = None,
) -> Message:
    state = load_problem(config).state()
    arrays = ArrayRecord({name: encode(value.numpy()) for name, value in state.items()})
    rate = config.local_lr if local_lr is None else local_lr
    told = ConfigRecord({"server-round": server_round, "local-lr": rate})
    rule = SentRule("sgd")
    if config.clip_norm:
        numbers = {"bound": config.clip_norm}
        if config.noise_location == "client":
            numbers |= {"noise-multiplier": z, "noise-shares": shares}
        rule = SentRule("clip-update", numbers)
    content = RecordDict({"arrays": arrays, "config": told, RULE: rule.record()})
    return Message(content, 5, "train", group_id=str(server_round))


def enrolment(client: Client, config: RunConfig) -> str:
    """The problem that a client answers the server's question with; empty: it takes part."""
    reply = client.send(config, Message(RecordDict(), 5, "query"))
    record = reply.content.get("config")
    return str(record["problem"]) if isinstance(record, ConfigRecord) else ""
