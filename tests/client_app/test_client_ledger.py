"""A client's ledger: what it has sent adds up over rounds, runs, restarts and programs."""

import math
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant
from flwr.app import Message
from policy_client import (
    AT_CLIENTS,
    COHORT,
    DP_SGD,
    Client,
    enrolment,
    run_config,
    train_message,
)

from blackthorn.client_app import clientapp as client_app
from blackthorn.client_app.client_ledger import ClientLedger, LedgerUnusable, Sent
from blackthorn.client_app.policy import PolicyRefusal
from blackthorn.launch.cli import main
from blackthorn.launch.federation.client_service import _node_config
from blackthorn.launch.federation.members import ClientSettings
from blackthorn.strategies.accounting import Release

DELTA = 1e-5


def epsilon(event: dp_accounting.DpEvent, count: int) -> float:
    """By another library, from the events alone."""
    accountant = RdpAccountant()
    accountant.compose(event, count)
    return float(accountant.get_epsilon(DELTA))


def test_a_round_is_answered_once_in_order_and_only_where_the_run_has_it(tmp_path: Path) -> None:
    client, config = Client(tmp_path, "max-rounds = 1000"), run_config(AT_CLIENTS)
    assert client.train(config, 3).has_content()
    for again in (3, 2):
        assert f"round {again} comes after round 3 of the same run" in client.refusal(config, again)
    for outside in (0, -1, 51, 10**6):
        assert f"round {outside} is not among the 50" in client.refusal(config, outside)
    assert client.train(config, 4).has_content()
    # Another run has rounds of its own; what they cost adds up.
    assert client.train(config, 3, run_id=2).has_content()
    sent = client.sent()
    assert (sent.rounds, sent.last_round) == (3, {"1": 4, "2": 3})
    # z/(2 √s) of what was asked for.
    assert sent.local == [(Release(4.0 / (2 * math.sqrt(COHORT))), 3)]


@pytest.mark.parametrize("key", ["ledger", "policy"])
def test_a_node_s_files_are_named_by_their_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """From another folder it would be another ledger, which begins anew."""
    monkeypatch.chdir(tmp_path)
    client, config = Client(tmp_path, "max-rounds = 1000"), run_config(AT_CLIENTS)
    client.node[key] = Path(client.node[key]).name
    with pytest.raises(ValueError, match="the client's policy or ledger cannot be used"):
        client.train(config, 1)
    assert not list(tmp_path.rglob("*ledger*"))


def test_a_ledger_that_begins_anew_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, config = Client(tmp_path, "max-rounds = 1000"), run_config(AT_CLIENTS)
    assert client.train(config, 1).has_content()
    assert str(client.ledger) in caplog.text
    caplog.clear()
    assert client.train(config, 2).has_content()
    assert caplog.text == ""


def test_a_round_that_may_be_repeated_is_charged_again(tmp_path: Path) -> None:
    """As for a server that goes on after a crash; the limits hold all the same."""
    client = Client(tmp_path, "max-rounds = 3\nrepeated-rounds = true")
    config = run_config(AT_CLIENTS)
    for server_round in (1, 2, 2):
        assert client.train(config, server_round).has_content()
    sent = client.sent()
    assert (sent.rounds, sent.last_round) == (3, {"1": 2})
    assert [count for _, count in sent.local] == [3]
    assert "max-rounds" in client.refusal(config, 2)


def test_a_ledger_without_a_policy_counts_and_refuses_nothing(tmp_path: Path) -> None:
    client, config = Client(tmp_path), run_config(AT_CLIENTS)
    for server_round in (2, 2, 1, 10**6):
        assert client.train(config, server_round).has_content()
    assert client.sent().rounds == 4


def test_rounds_of_all_runs_add_up_to_max_rounds(tmp_path: Path) -> None:
    client, config = Client(tmp_path, "max-rounds = 3"), run_config(AT_CLIENTS)
    for run_id, server_round in ((1, 1), (2, 1), (3, 1)):
        assert enrolment(client, config) == ""
        assert client.train(config, server_round, run_id).has_content()
    assert "as many rounds as its max-rounds allows" in client.refusal(config, 1, run_id=4)
    assert "as many rounds as its max-rounds allows" in enrolment(client, config)


def test_the_local_epsilon_of_all_runs_is_the_other_librarys(tmp_path: Path) -> None:
    """One message is a Gaussian of multiplier z/(2 √s): how many fit a budget."""
    z, cohort, fit = 40.0, 4, 5
    event = dp_accounting.GaussianDpEvent(z / (2 * math.sqrt(cohort)))
    limit = (epsilon(event, fit) + epsilon(event, fit + 1)) / 2
    client = Client(tmp_path, f"max-local-epsilon = {limit}\ndelta = {DELTA}")
    config = run_config(AT_CLIENTS)
    for run_id in range(fit):
        assert client.train(config, 1 + run_id % 2, run_id, z=z).has_content()
    assert "pass the client's max-local-epsilon" in client.refusal(config, 40, 1, z=z)
    # In more shares each client's is less, which costs more.
    config = run_config(AT_CLIENTS, num_clients=2 * cohort)
    asked = {"z": z, "shares": 2 * cohort}
    assert "pass the client's max-local-epsilon" in client.refusal(config, 40, 7, **asked)


def test_the_epsilon_of_an_example_is_the_other_librarys(tmp_path: Path) -> None:
    """K steps a round of a Poisson-subsampled Gaussian, over two runs."""
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    event = dp_accounting.PoissonSampledDpEvent(0.1, gaussian)
    limit = (epsilon(event, 3 * 4) + epsilon(event, 3 * 5)) / 2
    client = Client(tmp_path, f"max-sample-epsilon = {limit}\ndelta = {DELTA}")
    config = run_config(DP_SGD)
    for run_id, server_round in ((1, 1), (1, 2), (2, 1), (2, 2)):
        assert client.train(config, server_round, run_id).has_content()
    assert "pass the client's max-sample-epsilon" in client.refusal(config, 3, 2)
    # A run without DP-SGD tells of an example what it tells of all of them.
    assert client.sent().sample == [(Release(2.0, sample_rate=0.1), 12)]


def test_what_was_sent_before_there_was_a_policy_counts(tmp_path: Path) -> None:
    config = run_config(AT_CLIENTS)
    plain = run_config(AT_CLIENTS, algorithm="gfedavg", epsilon=0.0, clip_norm=0.0)
    plain = plain.model_copy(update={"noise_location": "server"})
    assert Client(tmp_path).train(plain, 1, run_id=9).has_content()
    client = Client(tmp_path, "max-local-epsilon = 1000.0")
    assert "pass the client's max-local-epsilon" in client.refusal(config, 1)
    assert "pass the client's max-local-epsilon" in enrolment(client, config)


@pytest.mark.parametrize(
    "values",
    [
        {**AT_CLIENTS, "claim-privacy": False},
        {**AT_CLIENTS, "insecure-seeded-noise": True},
        {**DP_SGD, "claim-privacy": False},
        {**DP_SGD, "insecure-seeded-noise": True},
    ],
)
@pytest.mark.parametrize("kind", ["train", "query", "evaluate"])
def test_no_noise_covers_what_a_run_without_a_claim_is_told(
    tmp_path: Path, values: dict[str, Any], kind: str
) -> None:
    """The exact loss and number of examples are in the reply, whatever noise is in the model."""
    before, config = Client(tmp_path), run_config(values)
    message = Message(train_message(config, 1).content, 5, kind)
    # A share that the server deals has no held-out examples; another would be evaluated on them.
    with nullcontext() if kind != "evaluate" else pytest.raises(ValueError, match="no held-out"):
        before.send(config, message, run_id=9)
    later = Client(tmp_path, "max-local-epsilon = 1000.0")
    assert "pass the client's max-local-epsilon" in later.refusal(run_config(AT_CLIENTS), 1)
    later = Client(tmp_path, "max-sample-epsilon = 1000.0")
    assert "pass the client's max-sample-epsilon" in later.refusal(run_config(DP_SGD), 1)


@pytest.mark.parametrize("values", [AT_CLIENTS, DP_SGD])
def test_who_enrols_under_a_claim_is_charged_nothing(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """Its count is not told there."""
    client, config = Client(tmp_path), run_config(values)
    assert enrolment(client, config) == ""
    assert client.sent() == Sent()


def test_the_charge_is_on_disk_before_anything_can_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies while training has been charged, and does not answer the round later."""
    client, config = Client(tmp_path, "max-rounds = 2"), run_config(AT_CLIENTS)

    def die(*_: object) -> None:
        assert client.sent().rounds == 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client_app, "noised_models", die)
        with pytest.raises(KeyboardInterrupt):
            client.train(config, 1)
    assert "comes after round 1" in client.refusal(config, 1)
    assert client.train(config, 2).has_content()
    assert "max-rounds" in client.refusal(config, 3)


def test_several_programs_of_a_client_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    charge = (Release(1.0), 1)

    def answer(number: int) -> bool:
        def count(sent: Sent) -> None:
            if "7" in sent.last_round:
                raise PolicyRefusal("answered before")
            sent.add(7, 1, charge, charge)

        try:
            ClientLedger(path).change(count)
        except PolicyRefusal:
            ClientLedger(path).change(lambda sent: sent.add(100 + number, 1, charge, charge))
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        answered = list(threads.map(answer, range(24)))
    assert sum(answered) == 1
    sent = ClientLedger(path).read()
    assert (sent.rounds, len(sent.last_round)) == (24, 24)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_ledger_behind_a_link_is_the_ledger(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    ClientLedger(tmp_path / "real" / "ledger.json").change(lambda _: None)
    (tmp_path / "ledger.json").symlink_to(tmp_path / "real" / "ledger.json")
    client, config = Client(tmp_path, "max-rounds = 1"), run_config(AT_CLIENTS)
    client.node["ledger"] = str(tmp_path / "ledger.json")
    client.ledger = tmp_path / "real" / "ledger.json"
    assert client.train(config, 1).has_content()
    assert (tmp_path / "ledger.json").is_symlink()
    assert "max-rounds" in client.refusal(config, 2)


def _damage(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _copy(path: Path) -> None:
    original = path.with_name("original.json")
    ClientLedger(original).change(lambda _: None)
    shutil.copy(original, path)


def _copy_of_what_cannot_be_read(path: Path) -> None:
    original = path.with_name("original.json")
    ClientLedger(original).change(lambda _: None)
    shutil.copy(original, path)
    original.write_text("{")


def _second_name(path: Path) -> None:
    ClientLedger(path).change(lambda _: None)
    path.with_name("again.json").hardlink_to(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_damage("{"), "cannot be read"),
        (_damage("[]"), "is not a privacy ledger"),
        (_damage('{"format": 1, "charges": []}'), "is not a client's ledger"),
        (_damage('{"format": 1, "kind": "client", "id": "a", "rounds": -1}'), "is damaged"),
        (
            _damage(
                '{"format": 1, "kind": "client", "id": "a", "rounds": 2, "last_round": {}, '
                '"local": [], "sample": []}'
            ),
            "rounds = 2, but 0 are charged",
        ),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.symlink_to(path.with_name("away.json")), "which is not there"),
        (_copy, "is a copy of"),
        (_copy_of_what_cannot_be_read, "nobody knows whether that is continued"),
        (_second_name, "has 2 names (hard links)"),
    ],
)
def test_without_a_ledger_that_can_be_kept_nothing_is_sent(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], object],
    said: str,
) -> None:
    client, config = Client(tmp_path, "max-rounds = 5"), run_config(AT_CLIENTS)
    client.ledger.parent.mkdir()
    spoil(client.ledger)
    with pytest.raises(LedgerUnusable):
        client.sent()
    with pytest.raises(ValueError) as refused:
        client.train(config, 1)
    # Where on its machine a client keeps its files is its own affair.
    assert str(refused.value) == "the client's policy or ledger cannot be used"
    assert str(client.ledger) in caplog.text
    assert said in caplog.text
    assert enrolment(client, config) == "the client's policy or ledger cannot be used"


def test_a_ledger_that_is_deleted_while_a_reply_is_counted_is_written_again(tmp_path: Path) -> None:
    path, charge = tmp_path / "ledger.json", (Release(1.0), 1)
    ClientLedger(path).change(lambda sent: sent.add(1, 1, charge, charge))

    def count(sent: Sent) -> None:
        path.unlink()
        sent.add(1, 2, charge, charge)

    ClientLedger(path).change(count)
    assert ClientLedger(path).read().rounds == 2


def _another(path: Path) -> None:
    path.unlink()
    ClientLedger(path).change(lambda _: None)


@pytest.mark.parametrize("what", [Path.unlink, _another])
def test_the_ledger_with_which_a_client_started_has_to_be_there(
    tmp_path: Path, what: Callable[[Path], None]
) -> None:
    """Deleted or replaced while the client is up, what it has sent would be forgotten."""
    client, config = Client(tmp_path, "max-rounds = 5"), run_config(AT_CLIENTS)
    client.node["ledger-id"] = ClientLedger(client.ledger).change(lambda _: None).ledger
    kept = client.ledger.read_bytes()
    assert client.train(config, 1).has_content()
    what(client.ledger)
    assert "ledger cannot be used" in client.refusal(config, 2)
    assert enrolment(client, config) == "the client's policy or ledger cannot be used"
    client.ledger.write_bytes(kept)
    assert client.train(config, 2).has_content()


def _exit_code() -> object:
    """Of the command, whichever way it ends."""
    try:
        main()
    except SystemExit as end:
        return end.code
    return None


def test_blackthorn_client_says_where_a_ledger_begins_and_knows_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[ClientSettings] = []
    monkeypatch.setattr("blackthorn.launch.federation.client_service.take_part", started.append)
    monkeypatch.chdir(tmp_path)
    ledger = tmp_path / "ledger.json"
    words = ["client", "--server", "127.0.0.1:9", "--insecure", "--client-id", "3"]
    monkeypatch.setattr(sys, "argv", ["blackthorn", *words, "--ledger", "ledger.json"])
    for told in (True, False):
        assert _exit_code() == 0
        said = f"ledger {ledger} does not exist: a new one begins there, with nothing spent"
        assert (said in capsys.readouterr().err) == told
    ids = [_node_config(settings)["ledger-id"] for settings in started]
    assert ids == [ClientLedger(ledger).read().ledger] * 2
    ledger.rename(tmp_path / "moved.json")
    monkeypatch.setattr(sys, "argv", ["blackthorn", *words, "--ledger", "moved.json"])
    for told in (True, False):
        assert _exit_code() == 0
        said = f"ledger {tmp_path / 'moved.json'} was elsewhere before ({ledger})"
        assert (said in capsys.readouterr().err) == told
    monkeypatch.setattr(sys, "argv", ["blackthorn", *words, "--ledger", "ledger.json"])
    ledger.symlink_to(tmp_path / "away.json")
    assert _exit_code() == 2
    error = capsys.readouterr().err
    assert f"--ledger: ledger {ledger} cannot be read: {ledger} is a link to" in error
    assert error.count("\n") == 1
    assert len(started) == 4
    assert not (tmp_path / "away.json").exists()


def test_a_policy_needs_a_ledger_and_must_be_there(tmp_path: Path) -> None:
    config = run_config(AT_CLIENTS)
    without = Client(tmp_path, "max-rounds = 5", ledger=False)
    lost = Client(tmp_path, "max-rounds = 5")
    lost.node["policy"] = str(tmp_path / "no-policy.toml")
    for client in (without, lost):
        assert enrolment(client, config) == "the client's policy or ledger cannot be used"


def test_without_policy_and_ledger_nothing_changes(tmp_path: Path) -> None:
    client, config = Client(tmp_path, ledger=False), run_config(AT_CLIENTS)
    for server_round in (1, 1, 10**6):
        assert client.train(config, server_round).has_content()
    assert list(tmp_path.iterdir()) == []
