"""What the server sends a client says nothing of who else is asked: the others, who know that
they were, would know of the one that was not among them."""

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs
from noised_rounds import choose

from blackthorn.attacks.round_config import expected_cohort
from blackthorn.recording.privacy import privacy_plan
from blackthorn.settings.config import make_config, to_mapping
from blackthorn.settings.derived import noise_shares
from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    PrivacyPlan,
)
from blackthorn.strategies.participation import Participation
from blackthorn.strategies.privacy_plan import Neighbours, NoiseLocation
from blackthorn.strategies.private_averaging import PrivateAveraging

CLIENTS = 6
TARGET = 12
KINDS: dict[str, tuple[Participation, Neighbours]] = {
    "poisson": (PoissonParticipation(0.5), "add-remove"),
    "full": (FullParticipation(), "add-remove"),
    "fixed": (FixedParticipation(CLIENTS - 1), "replace-one"),
}


def messages_of_a_run(
    system: type[PrivateAveraging], kind: str, location: NoiseLocation, cohort: Sequence[int]
) -> list[Message]:
    """The train messages of two rounds that ask `cohort`."""
    participation, neighbours = KINDS[kind]
    plan = PrivacyPlan(
        ClipNorm(1.0),
        noise_multiplier=1.0,
        num_clients=CLIENTS,
        rounds=2,
        participation=participation,
        neighbours=neighbours,
        noise_location=location,
    )
    grid = MemoryGrid(
        {10 + i: runs(quadratic_app(i, 10, attests=True)) for i in range(CLIENTS)},
    )
    strategy = system(plan, local_rate=0.25, statistics="server")
    train_config = ConfigRecord({"seed": 3})
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, cohort)
        strategy.start(grid, initial_model(), num_rounds=2, timeout=30.0, train_config=train_config)
    return [m for m in grid.sent if m.metadata.message_type == "train"]


def said(message: Message) -> dict[str, Any]:
    """All of a message but the model, which is released, its id and nonce, what its run's rounds
    are called, and when it was written."""
    content = {name: dict(record) for name, record in message.content.config_records.items()}
    assert len(str(content["config"].pop("nonce"))) == 32
    assert len(str(content["config"].pop("round-series"))) == 32
    assert set(message.content) == {"arrays", "config", "rule", "layout"}
    own = ("_message_id", "_created_at", "_delivered_at")
    metadata = {k: v for k, v in message.metadata.__dict__.items() if k not in own}
    return {**content, "metadata": metadata, "size": len(message.content["arrays"])}


def test_nobody_can_guess_what_another_is_sent() -> None:
    """A record is known to Flower's servers by its SHA-256, and they may be asked for it."""
    runs = [messages_of_a_run(DPFedAvg, "full", "server", range(10, 13)) for _ in range(2)]
    sent = [message.content["config"].object_id for run in runs for message in run]
    assert len(set(sent)) == len(sent) == 12


@pytest.mark.parametrize("location", ["server", "client"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("system", [DPFedAvg, DPNormFedAvg])
def test_a_client_is_told_the_same_whoever_else_is_asked(
    system: type[PrivateAveraging], kind: str, location: NoiseLocation
) -> None:
    alone = messages_of_a_run(system, kind, location, [TARGET])
    among = messages_of_a_run(system, kind, location, range(11, 10 + CLIENTS))
    received = [m for m in among if m.metadata.dst_node_id == TARGET]
    assert len(alone) == len(received) == 2
    assert len(among) == 2 * (CLIENTS - 1)
    named = {message.content.config_records["config"]["round-series"] for message in among}
    assert len(named) == 1
    for one, other in zip(alone, received, strict=True):
        assert said(one) == said(other)


def test_the_messages_of_a_round_were_written_at_one_time() -> None:
    """One after the other, their times would tell how many lie between two clients'."""
    messages = messages_of_a_run(DPFedAvg, "poisson", "server", range(10, 10 + CLIENTS))
    for group in ("1", "2"):
        times = {m.metadata.created_at for m in messages if m.metadata.group_id == group}
        assert len(times) == 1


PARTICIPATION: dict[str, dict[str, Any]] = {
    "full": {"participation": "full"},
    "poisson": {"participation": "poisson", "sample-rate": 0.25},
    "fixed": {"participation": "fixed", "clients-per-round": 3},
}


@pytest.mark.parametrize(("kind", "shares"), [("full", 20), ("poisson", 20), ("fixed", 3)])
def test_clients_and_server_count_the_same_shares(kind: str, shares: int) -> None:
    """No cohort is larger, and all know it before the run."""
    noise = {"noise-location": "client", "noise-multiplier": 1.0, "clip-norm": 1.0}
    values = {"num-clients": 20, "algorithm": "dp-fedavg", **noise, **PARTICIPATION[kind]}
    config = make_config(values)
    assert noise_shares(config) == privacy_plan(config).noise_shares == shares


@pytest.mark.parametrize(("kind", "expected"), [("full", 20), ("poisson", 5), ("fixed", 3)])
def test_an_attacker_knows_the_cohort_that_is_to_be_expected(kind: str, expected: int) -> None:
    config = make_config({"num-clients": 20, **PARTICIPATION[kind]})
    assert expected_cohort(Context(1, 2, {}, RecordDict(), to_mapping(config))) == expected
    assert expected_cohort(Context(1, 2, {}, RecordDict(), {})) == 1
