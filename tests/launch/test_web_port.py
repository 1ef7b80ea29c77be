"""The port with /metrics and /healthz: what it serves, to whom, and where it may not."""

import contextlib
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from blackthorn.launch.federation import measures
from blackthorn.launch.federation.addresses import Address, free_loopback_ports
from blackthorn.launch.federation.certificates import expiry
from blackthorn.launch.federation.certs import make
from blackthorn.launch.federation.client_metrics import ClientMetrics
from blackthorn.launch.federation.measures import exposition
from blackthorn.launch.federation.web_port import Page, healthz, web_address, web_port
from blackthorn.settings.config import ConfigError


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_pages_are_made_when_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_loopback_ports(1)
    wrong, said = ["the disk is full"], list[str]()
    with web_port(
        Address("127.0.0.1", port),
        {"/healthz": healthz(lambda: wrong[0])},
        wanted=True,
        say=said.append,
    ):
        assert said == [f"/metrics and /healthz are at http://127.0.0.1:{port}"]
        assert get(port, "/healthz?x=1") == (503, "the disk is full\n")
        wrong[0] = ""
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/etc/passwd") == (404, "there is nothing here: /healthz\n")
        request = urllib.request.Request(f"http://127.0.0.1:{port}/healthz", b"x", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=30)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert capsys.readouterr() == ("", "")


def test_so_many_are_served_at_a_time_and_more_are_hung_up_on() -> None:
    (port,) = free_loopback_ports(1)
    waits = threading.Event()

    def slow() -> Page:
        waits.wait(30)
        return Page(b"late")

    with web_port(Address("127.0.0.1", port), {"/": slow}, wanted=True, say=lambda _: None):
        held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(8)]
        for one in held:
            one.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as ninth,
            # Hung up on without a word: at its end, or by a reset.
            contextlib.suppress(ConnectionResetError),
        ):
            assert ninth.recv(1) == b""
        waits.set()
        for one in held:
            answer = b""
            while part := one.recv(4096):
                answer += part
            assert answer.endswith(b"late")
            one.close()


def test_a_port_that_is_taken_is_an_error_where_it_was_asked_for_and_else_a_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address, said = Address("127.0.0.1", taken.getsockname()[1]), list[str]()
        with web_port(address, {}, wanted=False, say=said.append):
            pass
        assert [line.startswith("there is no /metrics and no /healthz: ") for line in said] == [
            True
        ]
        with (
            pytest.raises(ConfigError, match=f"--metrics-port: {address} cannot be listened on"),
            web_port(address, {}, wanted=True, say=said.append),
        ):
            pass


def test_where_it_listens_is_checked_before_anything_is_started() -> None:
    assert web_address(0, "127.0.0.1") is None
    assert web_address(9095, "[::1]") == Address("::1", 9095)
    for port, bind, said in (
        (65536, "127.0.0.1", "--metrics-port 65536 is not allowed: 1 to 65535, or 0 for none"),
        (9095, "", "--metrics-bind is empty"),
        (9095, "a:b", "--metrics-bind a:b is not allowed"),
    ):
        with pytest.raises(ConfigError) as caught:
            web_address(port, bind)
        assert str(caught.value).startswith(said)


def test_a_client_shows_whether_it_is_connected_and_its_certificate_and_nothing_of_rounds(
    tmp_path: Path,
) -> None:
    make(tmp_path, ["localhost"], [])
    end = expiry(tmp_path / "ca.crt")
    assert end is not None
    problem = ["not connected"]
    metrics = ClientMetrics(tmp_path / "ca.crt", lambda: problem[0])
    for said, value in (("not connected", "0.0"), ("", "1.0")):
        problem[0] = said
        text = exposition(metrics).decode()
        assert f"\nblackthorn_client_connected {value}\n" in text
    shown = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
    assert shown == {one.name for one in measures.CLIENT}
    (days,) = [line for line in text.splitlines() if line.startswith("blackthorn_certificate")]
    assert 'file="ca.crt"' in days
    assert float(days.split()[-1]) == pytest.approx(3650, abs=0.01)


@pytest.mark.parametrize("name", ["SERVER", "CLIENT"])
def test_the_page_for_operators_has_every_measure_and_what_a_claim_leaves_of_it(
    repository: Path, name: str
) -> None:
    page = (repository / "docs" / "operations.md").read_text()
    assert "\n".join(measures.table(getattr(measures, name))) in page


def test_a_server_s_own_process_needs_no_torch_for_it() -> None:
    code = "import sys, blackthorn.launch.federation.server_metrics; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False\n"
