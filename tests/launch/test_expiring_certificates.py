"""Certificates that expire soon are named in time, to whoever has to see to it."""

import contextlib
import json
import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from process_watch import until
from real_deployment import bench

from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.certificates import (
    CertificateError,
    expiry,
    make_server_certificate,
)
from blackthorn.launch.federation.certs import make
from blackthorn.launch.federation.expiry import DailyWarnings, at_the_server

DAY = 86_400.0
DATED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


@pytest.mark.parametrize(
    ("days", "said"), [(1, "in less than a day"), (29, "in 28 days"), (31, None)]
)
def test_a_certificate_is_named_from_thirty_days_before_its_end(
    tmp_path: Path, days: int, said: str | None
) -> None:
    make(tmp_path, ["localhost"], [], days)
    end = expiry(tmp_path / "server.pem")
    assert end is not None
    left = end - datetime.now(UTC)
    assert timedelta(days=days, minutes=-5) < left < timedelta(days=days)
    warnings = at_the_server(tmp_path, "localhost")
    if said is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert f"{tmp_path / 'server.pem'} expires on {end:%Y-%m-%d}, {said}: " in warning
        assert f"blackthorn certs {tmp_path} --renew" in warning


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    make(tmp_path, ["localhost"], [])
    for name in ("server.pem", "server.key"):
        (tmp_path / name).unlink()
    with pytest.raises(CertificateError, match=r"--days 3651 is not allowed: .* expires in 36\d\d"):
        make_server_certificate(tmp_path, ["localhost"], 3651)
    assert not (tmp_path / "server.pem").exists()


def test_it_is_said_at_the_start_and_once_a_day() -> None:
    now, said = [0.0], list[str]()
    daily = DailyWarnings(lambda: [f"at {now[0] / DAY:g}"], said.append, lambda: now[0])
    for now[0] in (0.0, 1.0, DAY - 1, DAY, 1.5 * DAY, 4 * DAY):
        daily.look()
    assert said == ["at 0", "at 1", "at 4"]


def loopback() -> tuple[str, str]:
    """The loopback interface's address in both of its forms: of IPv6 where this machine has it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as one:
        one.bind(("::1", 0))
        return "::1", "[::1]"
    return "127.0.0.1", "127.0.0.1"


@pytest.mark.deployment
def test_server_client_and_operator_are_told_and_a_wrong_port_is_one_line(tmp_path: Path) -> None:
    """In lines with dates, without colours, at an address of IPv6."""
    bare, bracketed = loopback()
    fleet, control = free_loopback_ports(2)
    with bench(tmp_path) as programs:
        options = ("--host", bracketed, "--client", "node0", "--days", 10)
        assert programs.call("certs", "certs", *options).returncode == 0
        server = programs.start(
            *("server", "server", "--host", bare, "--bind", bracketed, "--certs", "certs"),
            *("--port", fleet, "--control", f"127.0.0.1:{control}"),
        )
        server.says("server.pem expires on ")
        server.says("ready:")
        operator = ("--certs", "certs", "--server", f"localhost:{control}")
        assert programs.call("register", "node0", *operator).returncode == 0
        trust = ("--ca", "certs/ca.crt", "--key", "certs/clients/node0")
        client = programs.start("client", "client", "--server", f"{bracketed}:{fleet}", *trust)
        client.says("connected to ")
        client.says("its operator must make a new one")
        end = expiry(tmp_path / "certs" / "server.pem")
        assert end is not None
        soon = f"expires on {end:%Y-%m-%d}, in 9 days: "
        assert (
            f"{tmp_path / 'certs' / 'server.pem'} {soon}renew it, with the server running: "
            in server.text()
        )
        assert f"the certificate of {bracketed}:{fleet} {soon}its operator" in client.text()

        shown = programs.call("status", *operator)
        assert f"the certificate of localhost:{control} {soon}" in shown.stdout
        known = json.loads(programs.call("status", *operator, "--json").stdout)
        (node,) = known["clients"]
        assert (known["run"], known["refusals"]) == (None, [])
        assert (node["name"], node["state"], node["client"]) == ("node0", "online", None)
        seen = datetime.now(UTC) - datetime.fromisoformat(node["last_seen"])
        assert timedelta(minutes=-1) < seen < timedelta(minutes=5)
        assert [soon in warning for warning in known["expiring"]] == [True]

        wrong = programs.call(
            "client", "--server", f"localhost:{control}", *trust, "--logs", "wrong"
        )
        assert wrong.returncode == 1
        *_, last = wrong.stderr.splitlines()
        assert last.startswith(f"failed: localhost:{control} is not the clients' port of a")
        wrong = programs.call("status", "--certs", "certs", "--server", f"{bracketed}:{fleet}")
        assert wrong.returncode == 1
        assert wrong.stderr == (
            f"failed: {bracketed}:{fleet} is not the operators' port of a blackthorn server (9093 "
            "by default)\n"
        )

        for said in (server, client):
            assert all(DATED.match(line) for line in said.text().splitlines()), said.text()
        for log in ("state/logs/superlink.log", "blackthorn-client-0/supernode.log"):
            text = (tmp_path / log).read_text()
            assert "\x1b" not in text
            assert re.search(r"^INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text, re.MULTILINE), text
        until(lambda: client.stop() is not None)
