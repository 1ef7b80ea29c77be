"""Secure aggregation with anybody's ClientApp, and whose keys a client takes."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from flwr.app import Context, Error, Message, RecordDict
from memory_grid import Answer, MemoryGrid, runs
from own_project import RATE, network, project_app

from blackthorn.client_app import mod
from blackthorn.client_app.members import own_key, read_members, registered_keys
from blackthorn.secure_aggregation.key_agreement import Refused
from blackthorn.settings.config import ConfigError
from blackthorn.strategies import ClipNorm
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.secure_averaging import SecureAveraging
from blackthorn.strategies.secure_plan import SecurePlan
from blackthorn.wire import ARRAYS, METRICS, SECURE

CLIENTS, ROUNDS = 4, 2


def plan(**changes: Any) -> SecurePlan:
    values: dict[str, Any] = {
        **{"clip_norm": ClipNorm(0.5), "noise_multiplier": 1.0, "num_clients": CLIENTS},
        **{"rounds": ROUNDS, "survivors": 3, "delta": 1e-3, **changes},
    }
    return SecurePlan(**values)


def grid_of(node_configs: dict[int, dict[str, Any]] | None = None, **options: Any) -> MemoryGrid:
    """Other people's apps on nodes 10, 11, ..., with the mod unless `mods` says otherwise."""
    options.setdefault("mods", [mod])
    own = node_configs or {}
    return MemoryGrid(
        {
            10 + i: runs(
                project_app(i, model=lambda: network(norm=False), **options),
                **{"partition-id": i, **own.get(i, {})},
            )
            for i in range(CLIENTS)
        }
    )


def reports_of(
    grid: MemoryGrid, identity: Literal["query", "node"] = "query", **changes: Any
) -> list[RoundReport]:
    reports: list[RoundReport] = []
    strategy = SecureAveraging(
        plan(**changes), local_rate=RATE, identity=identity, observers=[reports.append]
    )
    strategy.start(grid, network(norm=False), ROUNDS, timeout=60)
    return reports[-ROUNDS:]


def test_the_mod_masks_for_any_app_and_the_sum_is_that_of_its_clipped_updates() -> None:
    grid = grid_of()
    reports = reports_of(grid, noise_multiplier=0.02, bits=24, claim=False)
    for report in reports:
        assert report.accepted == [0, 1, 2, 3]
        assert report.aggregate is not None
        # Updates far longer than C, each of which is clipped: their mean is no longer than C.
        assert 0.1 < float(report.aggregate.norm()) < 0.6
    exchanges = [
        m.content.config_records[SECURE]["exchange"] for m in grid.sent if SECURE in m.content
    ]
    assert exchanges == [
        name
        for _ in range(ROUNDS)
        for name in ("keys", "shares", "masked", "consistency", "unmask")
        for _ in range(CLIENTS)
    ]


@pytest.mark.parametrize("claim", [True, False])
def test_who_masks_says_nothing_of_its_training_whether_the_server_says_that_it_claims_or_not(
    claim: bool,
) -> None:
    grid, said = grid_of(), []
    honest = grid.nodes[11]

    def overheard(message: Message) -> Message | None:
        reply = honest(message)
        if reply is not None and reply.has_content() and ARRAYS in reply.content:
            said.append(set(reply.content.metric_records[METRICS]))
        return reply

    grid.nodes[11] = overheard
    for report in reports_of(grid, claim=claim):
        assert report.accepted == [0, 1, 2, 3]
    assert len(said) == ROUNDS
    assert all("train-loss" not in names for names in said), said


def test_an_app_without_the_mod_gives_nothing() -> None:
    for report in reports_of(grid_of(mods=[]), identity="node"):
        assert report.accepted == []
        assert report.skipped is not None
        assert "0 of 4 clients told their keys" in report.skipped


def test_a_node_that_was_restarted_in_between_is_gone_and_the_others_are_summed() -> None:
    grid = grid_of()
    honest = grid.nodes[12]

    def forgetful(message: Message) -> Message | None:
        if SECURE in message.content:
            exchange = message.content.config_records[SECURE]["exchange"]
            if exchange == "masked":
                # Another process, with another context.
                return grid_of().nodes[12](message)
        return honest(message)

    grid.nodes[12] = forgetful
    for report in reports_of(grid):
        assert report.accepted == [0, 1, 3]
        (lost,) = report.rejected
        assert lost.client == 2
        assert "has told no keys" in lost.reason


@pytest.mark.parametrize("twice", ["shares", "masked", "consistency", "unmask"])
def test_of_processes_that_are_asked_at_once_with_one_context_one_alone_answers(twice: str) -> None:
    """Flower starts one a message, each with a copy of the context as it is then, and keeps the
    copy of whoever ends last."""
    grid, kept = grid_of(), RecordDict()
    seconds: list[Message] = []
    app = project_app(2, model=lambda: network(norm=False), mods=[mod])

    def process(message: Message, state: RecordDict) -> Message:
        try:
            return app(message, Context(1, 12, {"partition-id": 2}, state, {}))
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    def node(message: Message) -> Message:
        nonlocal kept
        before, kept = deepcopy(kept), deepcopy(kept)
        reply = process(message, kept)
        asked = message.content.config_records.get(SECURE)
        if asked is not None and asked["exchange"] == twice:
            seconds.append(process(message, before))
        return reply

    grid.nodes[12] = node
    assert [report.accepted for report in reports_of(grid)] == [[0, 1, 2, 3]] * ROUNDS
    assert len(seconds) == ROUNDS
    for second in seconds:
        assert second.has_error()
        assert f"the exchange '{twice}' has been answered" in str(second.error.reason)


def test_rounds_that_are_broken_off_leave_no_file_of_theirs_but_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    grid = grid_of()
    reports_of(grid)
    assert list(tmp_path.iterdir()) == []

    def silent_when_it_masks(message: Message, honest: Answer) -> Message | None:
        record = message.content.config_records.get(SECURE)
        return None if record is not None and record["exchange"] == "masked" else honest(message)

    for node in (10, 11):
        grid.nodes[node] = partial(silent_when_it_masks, honest=grid.nodes[node])
    strategy = SecureAveraging(plan(), local_rate=RATE, identity="query")
    strategy.start(grid, network(norm=False), ROUNDS, timeout=4)
    assert len(list(tmp_path.iterdir())) == CLIENTS


# Registered keys.


def written_keys(folder: Path) -> tuple[list[Path], str]:
    """A private key of every client, and the list of their public ones."""
    paths, lines = [], ["# the members"]
    for client in range(CLIENTS):
        key = ec.generate_private_key(ec.SECP384R1())
        words = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        paths.append(folder / f"node{client}")
        paths[-1].write_bytes(words)
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        lines.append(f"{client} {public.decode()} node{client}")
    return paths, "\n".join(lines) + "\n"


def nodes_with(paths: list[Path], members: Path) -> dict[int, dict[str, Any]]:
    return {
        client: {"identity-key": str(path), "members": str(members)}
        for client, path in enumerate(paths)
    }


def test_with_lists_of_members_the_round_goes_by_signed_keys(tmp_path: Path) -> None:
    paths, listed = written_keys(tmp_path)
    (tmp_path / "members").write_text(listed)
    reports = reports_of(grid_of(nodes_with(paths, tmp_path / "members")))
    assert all(report.accepted == [0, 1, 2, 3] for report in reports)


def test_keys_by_another_than_the_listed_one_are_taken_by_nobody(tmp_path: Path) -> None:
    paths, listed = written_keys(tmp_path)
    (tmp_path / "members").write_text(listed)
    paths[2].write_bytes(paths[3].read_bytes())
    for report in reports_of(grid_of(nodes_with(paths, tmp_path / "members"))):
        assert report.accepted == []
        told = {lost.client: lost.reason for lost in report.rejected}
        for client in (0, 1, 3):
            assert "the keys of client 2 are not signed by its registered key" in told[client]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0 nonsense", "line 1"),
        ("x ecdsa-sha2-nistp384 AAAA", "line 1"),
        ("# none\n\nfoo", "line 3"),
    ],
)
def test_a_list_that_cannot_be_read_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "members"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_members(path)
    with pytest.raises(Refused, match="list of members"):
        registered_keys({"members": str(path)})


def test_a_client_twice_and_a_key_of_another_kind_are_refused(tmp_path: Path) -> None:
    _, listed = written_keys(tmp_path)
    path = tmp_path / "members"
    path.write_text(listed + listed.splitlines()[1])
    with pytest.raises(ConfigError, match="client 0 is there twice"):
        read_members(path)
    other = ed25519.Ed25519PrivateKey.generate()
    path.write_bytes(
        other.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(Refused, match="none of an elliptic curve"):
        own_key({"identity-key": str(path)})
    with pytest.raises(Refused, match="cannot be read"):
        own_key({"identity-key": str(tmp_path / "nobody")})
    assert own_key({}) is None
    assert registered_keys({}) is None
