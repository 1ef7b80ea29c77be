"""A private run killed at random instants: the ledger is whole and never behind the releases."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from charged_ledgers import read_charges

from blackthorn.strategies import (
    ClipNorm,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
    durable_file,
    spent,
)
from blackthorn.strategies.ledger import LedgerInUse

# A run whose observer writes down every model it has seen: what an attacker may have.
PROGRAM = """
import os
import sys
from pathlib import Path

import numpy as np
import opacus
from flwr.app import Array, ArrayRecord

from blackthorn.flower_port.synchronous import SynchronousGrid
from blackthorn.strategies import ClipNorm, DPFedAvg, PoissonParticipation, PrivacyPlan


class NobodyAnswers(SynchronousGrid):
    def get_node_ids(self):
        return [10, 11]

    def send_and_receive(self, messages, timeout=None):
        return []


def publish(report):
    if report.server_round:
        with open(sys.argv[2], "a") as released:
            released.write(f"{report.server_round}\\n")
            released.flush()
    os.write(1, b"r")


def run():
    plan = PrivacyPlan(ClipNorm(1.0), 2.0, 2, 100_000, PoissonParticipation(0.5))
    strategy = DPFedAvg(plan, ledger=Path(sys.argv[1]), observers=[publish])
    model = ArrayRecord({"w": Array(np.zeros(2000, dtype=np.float32))})
    strategy.start(NobodyAnswers(), model, num_rounds=100_000, timeout=5)


# Imports take seconds: every run is a fork of a process that has them behind it.
while sys.stdin.readline():
    child = os.fork()
    if child == 0:
        run()
    os.write(1, f"{child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"\\n")
"""
KILLS = 25


def plan() -> PrivacyPlan:
    return PrivacyPlan(ClipNorm(1.0), 2.0, 2, 100_000, PoissonParticipation(0.5))


def test_killed_at_random_instants(tmp_path: Path) -> None:
    ledger, released = tmp_path / "ledger.json", tmp_path / "released"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    waits = random.Random(5)
    charged = 0
    command = [sys.executable, "-c", PROGRAM, str(ledger), str(released)]
    parent = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    for kill in range(1, KILLS + 1):
        parent.stdin.write(b"go\n")
        # The child says "r" after every model, the parent who the child is.
        said = b""
        while said.count(b"r") < 3 or b"\n" not in said:
            said += parent.stdout.read(1)
        time.sleep(waits.uniform(0.0, 0.1))
        os.kill(int(said.replace(b"r", b"")), signal.SIGKILL)
        while parent.stdout.read(1) != b"\n":
            pass
        rounds = sum(count for _, count in read_charges(ledger))
        seen = len(released.read_text().splitlines())
        assert json.loads(ledger.read_text())["rounds"] == rounds
        # Each kill may have hit the moment between charge and release, and costs one round at most.
        assert seen <= rounds <= seen + kill
        # The run continued what was there.
        assert rounds > charged
        charged = rounds
    parent.stdin.close()
    assert parent.wait(30) == 0
    parent.stdout.close()
    assert Ledger(plan(), ledger).figure() == spent([(plan().release(), charged)], 1e-5)


class InterruptedAt:
    """Raises KeyboardInterrupt in the file `module` before its `step`-th instruction, as a signal's
    handler may; `steps` counts them."""

    def __init__(self, module: str, step: int) -> None:
        self._module = module
        self._step = step
        self.steps = 0

    def __enter__(self) -> "InterruptedAt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != self._module:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.steps += 1
            if self.steps == self._step:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_interrupted_between_any_two_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a signal cut short is closed once: a second time is "Bad file descriptor", or closes
    somebody else's file. Nothing stays locked, and the file is whole."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    module = durable_file.__file__
    release = plan().release()
    for step in range(1, 2000):
        path = tmp_path / f"{step}.json"
        ledger = Ledger(plan(), path)
        ledger.charge(release)
        interrupted = False
        with InterruptedAt(module, step) as trace:
            try:
                ledger.charge(release)
                ledger.close()
            except KeyboardInterrupt:
                interrupted = True
        ledger.close()
        after = Ledger(plan(), path)
        assert after.rounds in ((1, 2) if interrupted else (2,))
        after.charge(release)
        after.close()
        if not interrupted:
            break
    assert 50 < trace.steps < step


def test_half_a_file_never_takes_the_ledgers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(plan(), path)
    ledger.charge(plan().release())
    before = path.read_text()

    def crash(descriptor: int) -> None:
        del descriptor
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        ledger.charge(plan().release())
    assert path.read_text() == before


def test_the_file_and_its_name_are_synchronised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(plan(), path)
    ledger.hold()
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    ledger.charge(plan().release())
    assert synced == [".ledger.json.part", tmp_path.name]


def test_two_runs_cannot_charge_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    one, other = Ledger(plan(), path), Ledger(plan(), path)
    one.charge(plan().release())
    with pytest.raises(LedgerInUse, match="in use by another run"):
        other.charge(plan().release())
    late = Ledger(plan(), path)
    one.charge(plan().release())
    one.close()
    with pytest.raises(LedgerInUse, match="charged by another run meanwhile"):
        late.charge(plan().release())
