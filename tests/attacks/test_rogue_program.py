"""The rogue's command line, and which behaviour it shows when."""

import runpy
import signal
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from fleet_server import fleet
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from process_watch import until
from real_deployment import bench

from blackthorn.attacks.rogue.__main__ import (
    at_random,
    check_address,
    check_behaviours,
    in_turn,
    main,
)
from blackthorn.attacks.rogue.behaviours import BEHAVIOURS


@pytest.mark.parametrize("address", ["127.0.0.1:9092", "127.8.9.1:1", "localhost:9092", "[::1]:1"])
def test_loopback_is_allowed(address: str) -> None:
    check_address(address, [])


@pytest.mark.parametrize("host", ["superlink", "10.0.0.7", "example.org", "0.0.0.0"])
def test_other_hosts_are_allowed_by_name_alone(host: str) -> None:
    with pytest.raises(ValueError, match=f"add --allow {host} if"):
        check_address(f"{host}:9092", ["another"])
    check_address(f"{host}:9092", [host])


@pytest.mark.parametrize("address", ["127.0.0.1", ":9092", "localhost:", "localhost:http"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="allowed are HOST:PORT"):
        check_address(address, [])


def test_behaviours_take_turns() -> None:
    choose = in_turn(check_behaviours("nan,huge,many-ids+pings"))
    assert [choose(t) for t in range(1, 6)] == ["nan", "huge", "many-ids+pings", "nan", "huge"]


def test_random_behaviour_is_the_seed_s_and_shows_all() -> None:
    choose, other = at_random(1), at_random(2)
    drawn = [choose(t) for t in range(1, 501)]
    assert drawn == [at_random(1)(t) for t in range(1, 501)]
    assert drawn != [other(t) for t in range(1, 501)]
    assert set(drawn) == set(BEHAVIOURS)


@pytest.mark.parametrize(
    "text", ["kindness", "nan,kindness", "", "nan,random", "many-ids+nan", "many-ids+", "+"]
)
def test_unknown_behaviours_are_answered_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="allowed are nan, infinite"):
        check_behaviours(text)


def test_wrong_arguments_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--superlink", "example.org:9092", "--client", "1"],
        ["--superlink", "127.0.0.1:1", "--client", "1", "--behaviour", "kindness"],
        ["--superlink", "127.0.0.1:1", "--client", "1", "--root-certificates", "/absent.pem"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith("rogue: ")


@pytest.mark.filterwarnings("ignore::RuntimeWarning:runpy")
def test_its_help_names_the_behaviours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rogue", "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("blackthorn.attacks.rogue", run_name="__main__")
    assert not left.value.code
    said = capsys.readouterr().out
    assert said.startswith("usage: rogue")
    assert "drip-fed" in said


def test_it_ends_although_its_heartbeats_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower neither signs off nor closes its connection then, and gRPC would wait for it."""
    keys = generate_key_pairs()
    own = keys[0].private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "key").write_bytes(own)
    refused: list[int] = []
    with fleet(tmp_path, guarded=False, tls=False) as one, bench(tmp_path) as programs:
        one.state.create_node("", "", public_key_to_bytes(keys[1]), 60.0)
        monkeypatch.setattr(
            one.state, "acknowledge_node_heartbeat", lambda node, _: refused.append(node)
        )
        rogue = programs.start_program(
            "rogue",
            [
                *(sys.executable, "-m", "blackthorn.attacks.rogue", "--superlink", one.address),
                *("--client", "1", "--key", "key"),
            ],
        )
        rogue.says("enrols as client 1", 60.0)
        rogue.says("does not recognize this SuperNode", 60.0)
        rogue.process.send_signal(signal.SIGINT)
        until(lambda: rogue.process.poll() is not None, 60.0)
    assert refused
    assert "ends without signing off" in rogue.text()
