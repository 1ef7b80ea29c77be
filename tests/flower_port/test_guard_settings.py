"""The guard's settings, its log, and what it expects of Flower."""

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_server import fleet

from blackthorn.flower_port.guard import checks, flower, gate
from blackthorn.flower_port.guard.connections import address_of
from blackthorn.flower_port.guard.limits import Limits, table
from blackthorn.flower_port.guard.superlink import rotate
from blackthorn.launch.federation.addresses import LOOPBACK


def test_the_page_has_the_limits_and_their_reasons(repository: Path) -> None:
    page = (repository / "docs" / "security.md").read_text()
    assert "\n".join(table()) in page


def test_the_page_has_every_kind_of_refusal_and_which_are_offences(repository: Path) -> None:
    """As the guard's code has them, in calls of Refused and of Records.refuse."""
    told: dict[str, str] = {}
    for path in (repository / "flower_port" / "guard").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name("Refused") | ast.Attribute(attr="refuse"),
                    args=[ast.Constant(str(kind)), *_],
                ):
                    named = {w.arg: getattr(w.value, "value", None) for w in node.keywords}
                    harmless = named.get("offence") is False
                    is_offence = isinstance(node.func, ast.Name) and not harmless
                    told[kind] = "yes" if is_offence else "no"
                case ast.Tuple([ast.Name("address"), ast.Tuple([ast.Constant(str(kind)), *_])]):
                    told[kind] = "no"
    page = (repository / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| .* \| (yes|no) \|$", page, re.MULTILINE)
    assert dict(rows) == told
    assert len(rows) == len(told) > 15


def test_the_page_has_the_numbers_that_cannot_be_changed(repository: Path) -> None:
    page = (repository / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+)", page, re.MULTILINE)
    assert rows == [
        (str(checks._LONGEST_WORD), "characters"),
        (str(gate._LARGEST_KEY), "bytes"),
        (str(gate._REFUSALS_A_CONNECTION), "requests"),
        (str(gate._REFUSERS), "threads"),
        (str(checks._UNKNOWN_OBJECTS), "objects"),
        (str(flower.PING_SECONDS), "seconds"),
    ]


@pytest.mark.parametrize(
    ("bind", "tls", "is_private"),
    [
        (LOOPBACK, False, True),
        ("[::1]", False, True),
        ("0.0.0.0", False, False),
        ("[::]", False, False),
        ("0.0.0.0", True, True),
    ],
)
def test_the_guard_knows_whether_what_goes_over_its_port_can_be_read(
    bind: str, tls: bool, is_private: bool, tmp_path: Path
) -> None:
    """A claim of privacy asks it."""
    with fleet(tmp_path, tls=tls, bind=bind) as server:
        assert server.is_private == is_private


def test_a_limit_is_changed_by_its_name() -> None:
    changed = Limits.changed(["key-calls=3", "request-bytes=1e6"])
    assert (changed.key_calls, changed.request_bytes) == (3, 1e6)
    assert changed.key_connections == Limits().key_connections


@pytest.mark.parametrize(
    "setting", ["key-calls", "key-calls=", "key-calls=0", "key-calls=-1", "key-calls=nan", "x=1"]
)
def test_a_wrong_limit_is_one_line(setting: str) -> None:
    with pytest.raises(ValueError, match=f"^--limit {setting}: allowed"):
        Limits.changed([setting])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--limit", "key-calls=0"), "--limit key-calls=0: allowed is a number > 0"),
        (("--enable-http-api",), "--enable-http-api is not allowed: the guard knows the gRPC"),
        (("--fleet-api-type=grpc-adapter",), "--fleet-api-type is not allowed"),
    ],
)
def test_a_wrong_start_of_the_superlink_ends_with_2(
    tmp_path: Path, repository: Path, arguments: tuple[str, ...], line: str
) -> None:
    code = "from blackthorn.flower_port.programs import superlink; superlink()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--guard", str(tmp_path), "--insecure", *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {line}")


def test_lines_of_the_log_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flwr")
    before = list(logger.filters)
    try:
        flower.cut_log_lines(100)
        logger.error("Attempted to register %r", b"\xff" * 10_000)
        try:
            raise ValueError("y" * 10_000)
        except ValueError:
            logger.exception("it failed")
    finally:
        logger.filters[:] = before
    long, failed = (record for record in caplog.records if record.name == "flwr")
    assert len(long.getMessage()) < 200
    assert long.getMessage().endswith("(40025 characters)")
    assert len(failed.getMessage()) < 200
    assert failed.getMessage().startswith("it failed: ValueError: yyy")
    assert failed.exc_info is None


def test_a_log_is_begun_anew_and_one_old_one_kept(tmp_path: Path) -> None:
    log = tmp_path / "superlink.log"
    with log.open("ab", buffering=0) as output:
        output.write(b"first\n")
        assert not rotate(output.fileno(), 100)
        output.write(b"x" * 100)
        assert rotate(output.fileno(), 100)
        output.write(b"second\n")
    assert log.read_bytes() == b"second\n"
    assert (tmp_path / "superlink.log.1").read_bytes() == b"first\n" + b"x" * 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["superlink.log", "superlink.log.1"]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5", ("127.0.0.1", 5)),
        ("ipv6:%5B::1%5D:5", ("::1", 5)),
        ("ipv6:[::ffff:198.51.100.2]:5", ("198.51.100.2", 5)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", ("fe80::1", 5)),
        ("unix:", ("", 0)),
    ],
)
def test_who_grpc_says_it_is_is_who_the_kernel_says(peer: str, address: tuple[str, int]) -> None:
    assert address_of(peer) == address
