"""A client whose machine's clock is wrong, at a `blackthorn server` over TLS."""

import json
import sys
from pathlib import Path

import pytest
from process_watch import until
from real_deployment import bench

from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.certs import make

pytestmark = pytest.mark.deployment

# Found by every Python of a program: all of Flower in them sees another time, as on a machine whose
# clock is wrong.
SHIFTED = """
import datetime, os

import flwr.supercore.date

_ahead = datetime.timedelta(seconds=float(os.environ["SECONDS_AHEAD"]))
_now = flwr.supercore.date.now
flwr.supercore.date.now = lambda: _now() + _ahead
"""
ROUND_SECONDS = 50
# More than a round has: by its own clock the client is too late for every one.
MINUTE, HOUR = 60, 3600


def test_no_answer_is_lost_to_a_clock_a_minute_ahead_and_one_of_an_hour_is_named(
    tmp_path: Path, repository: Path
) -> None:
    make(tmp_path / "certs", ["localhost"], ["node0", "node1"])
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SHIFTED)
    fleet, control = free_loopback_ports(2)
    operator = ("--certs", "certs", "--server", f"localhost:{control}")
    with bench(tmp_path) as programs:
        server = programs.start(
            *("server", "server", "--host", "localhost", "--certs", "certs", "--state", "state"),
            *("--port", fleet, "--control", f"127.0.0.1:{control}"),
        )
        server.says("ready:")
        assert programs.call("register", "node0", "node1", *operator).returncode == 0

        def client(number: int, ahead: float) -> list[str]:
            clock = ["env", f"PYTHONPATH={tmp_path / 'clock'}", f"SECONDS_AHEAD={ahead}"]
            words = ["client", "--server", f"localhost:{fleet}", "--ca", "certs/ca.crt"]
            words += ["--key", f"certs/clients/node{number}", "--patience", "5"]
            return [*clock, sys.executable, "-m", "blackthorn", *words]

        minute = programs.start_program("minute", client(0, MINUTE))
        minute.says("connected to localhost")
        minute.says("this machine's clock is 60 s ahead of the server's: set it, by NTP")
        server.says("the clock of node0 is 60 s ahead of the server's: its operator should set it")
        run = programs.call(
            *("run", repository / "recipes" / "demo.toml", "--ca", "certs/ca.crt", "--follow"),
            *("--server", f"localhost:{control}", "--clients", 1, "--output-dir", "runs/ahead"),
            *("--set", "algorithm=gfedavg", "--set", "corrupt-fraction=0", "--set"),
            *("num-server-rounds=2", "--set", f"round-timeout={ROUND_SECONDS}"),
        )
        assert run.returncode == 0, run.stdout + run.stderr + minute.text()
        summary = json.loads((tmp_path / "state/runs/ahead/summary.json").read_text())
        assert summary["clients"] == {"invited": 2, "replied": 2, "rejected": 0}

        hour = programs.start_program("hour", client(1, HOUR))
        until(lambda: hour.process.poll() is not None, 240)
        assert hour.process.returncode == 1
        told = "a clock that is 3600 s ahead of the server's, where at most 305 s are taken"
        *_, last = hour.text().strip().splitlines()
        assert last.startswith(f"failed: localhost:{fleet} refused the key")
        assert f"{told}: set it, by NTP for example" in last
        status = programs.call("status", *operator).stdout
        assert any(line.startswith("node1: ") and told in line for line in status.splitlines())
