"""A certificate that no client would take is refused when the server or the client starts."""

import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from dated_certificates import federation, redate_authority, redate_server
from test_probe import grpc_server

from blackthorn.launch.cli import main
from blackthorn.launch.federation import server_metrics
from blackthorn.launch.federation.addresses import Address
from blackthorn.launch.federation.certificates import check_server_files
from blackthorn.launch.federation.expiry import at_the_server, expired_at_the_server
from blackthorn.launch.federation.members import ServerSettings
from blackthorn.launch.federation.probe import Refused, probe

DAY = timedelta(days=1)


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return federation(tmp_path / "certs", "node0")


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Refusal":
    return Refusal(monkeypatch, capsys)


class Refusal:
    """What `blackthorn ARGUMENTS` says where it ends with exit code 2, which has to be one line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._output = monkeypatch, capsys

    def __call__(self, command: str) -> str:
        self._patch.setattr(sys, "argv", ["blackthorn", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._output.readouterr().err
        assert (ended.value.code, said.count("\n")) == (2, 1), said
        return said


SERVER = "server --host localhost --certs certs --metrics-port 0"
CLIENT = "client --server localhost:1 --ca certs/ca.crt --key certs/clients/node0"


def test_an_expired_certificate_is_refused_with_its_date(certs: Path, refusal: Refusal) -> None:
    redate_server(certs, -9 * DAY, -2 * DAY)
    said = refusal(SERVER)
    assert f"{certs / 'server.pem'} expired on {datetime.now(UTC) - 2 * DAY:%Y-%m-%d}; " in said
    assert f"blackthorn certs {certs} " in said
    assert not Path("state").exists()


def test_a_certificate_that_is_not_good_yet_is_refused_and_both_times_named(
    certs: Path, refusal: Refusal
) -> None:
    redate_server(certs, DAY, 9 * DAY)
    said = refusal(SERVER)
    assert f"server.pem is not good before {datetime.now(UTC) + DAY:%Y-%m-%d }" in said
    assert f"this machine's clock says {datetime.now(UTC):%Y-%m-%d }" in said


def test_an_expired_authority_is_refused_by_server_and_client(
    certs: Path, refusal: Refusal
) -> None:
    redate_authority(certs, -9 * DAY, -2 * DAY)
    ended = f"{datetime.now(UTC) - 2 * DAY:%Y-%m-%d}"
    assert f"{certs / 'ca.crt'} expired on {ended}; make a new authority" in refusal(SERVER)
    asked = refusal(CLIENT)
    assert f"--ca certs/ca.crt expired on {ended}: get a new ca.crt from the server's" in asked
    assert f"--ca certs/ca.crt expired on {ended}: " in refusal("status --ca certs/ca.crt")


def test_an_authority_that_is_not_good_yet_is_refused_by_the_client(
    certs: Path, refusal: Refusal
) -> None:
    redate_authority(certs, DAY, 9 * DAY)
    assert "--ca certs/ca.crt is not good before " in refusal(CLIENT)


def test_a_certificate_of_another_authority_is_refused(
    certs: Path, tmp_path: Path, refusal: Refusal
) -> None:
    other = federation(tmp_path / "other")
    shutil.copy(other / "ca.crt", certs / "ca.crt")
    said = refusal(SERVER)
    assert f"clients that trust {certs / 'ca.crt'} do not take {certs / 'server.pem'}: " in said


def test_another_certificate_s_key_and_another_name_are_refused(
    certs: Path, tmp_path: Path, refusal: Refusal
) -> None:
    wrong = refusal(SERVER.replace("localhost", "other.example.org"))
    assert "--host other.example.org is not in the certificate" in wrong
    shutil.copy(federation(tmp_path / "other") / "server.key", certs / "server.key")
    assert f"server.key is not the key of {certs / 'server.pem'}; " in refusal(SERVER)
    (certs / "server.key").write_text("no key")
    assert f"{certs / 'server.key'} is not a private key" in refusal(SERVER)


def test_one_that_lasts_some_days_is_taken_and_warned_of(certs: Path) -> None:
    redate_server(certs, -DAY, 9.5 * DAY)
    redate_authority(certs, -DAY, 20.5 * DAY)
    check_server_files(certs, "localhost")
    own, authority = at_the_server(certs, "localhost")
    assert own.startswith(f"{certs / 'server.pem'} expires on ") and ", in 9 days: " in own
    assert authority.startswith(f"{certs / 'ca.crt'} expires on ") and ", in 20 days: " in authority
    assert expired_at_the_server(certs) == ""


def test_healthz_names_what_has_expired_while_the_server_ran(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Address("127.0.0.1", 1)
    settings = ServerSettings("localhost", here, here, certs=certs, state=certs.parent)
    monkeypatch.setattr(server_metrics, "is_serving", lambda _address: True)
    assert server_metrics.server_problem(settings, here) == ""
    redate_server(certs, -9 * DAY, -2 * DAY)
    said = server_metrics.server_problem(settings, here)
    assert said.startswith(f"{certs / 'server.pem'} expired on ")
    assert server_metrics.server_problem(replace(settings, certs=None), here) == ""


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (-9 * DAY, -2 * DAY, "has expired: its operator must make a new one"),
        (DAY, 9 * DAY, "is not good yet: set this machine's clock, or"),
    ],
)
def test_a_client_says_why_it_does_not_take_what_the_server_shows(
    certs: Path, begin: timedelta, end: timedelta, said: str
) -> None:
    redate_server(certs, begin, end)
    with grpc_server(certs) as address, pytest.raises(Refused) as refused:
        probe(Address("localhost", address.port), certs / "ca.crt")
    assert str(refused.value).startswith(f"the certificate of localhost:{address.port} {said}")
