"""One cluster for several runs, one after the other: most of a short run is the cluster's start.
And what is done to a cluster in the middle of a run."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blackthorn.launch.commands.cluster import run_on
from blackthorn.launch.federation.flower_cluster import FlowerCluster, Node
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import RunConfig

Run = Callable[[RunConfig], dict[str, Any]]


@contextlib.contextmanager
def shared_cluster(nodes: int | Sequence[Node], folder: Path) -> Iterator[Run]:
    """`blackthorn cluster` without its start and its end: what runs a configuration on `nodes`.

    The processes' logs are in `folder`/logs.
    """
    with FlowerCluster(nodes, folder) as flower:
        yield lambda config: run_on(flower, config, Console(quiet=True))


def on_every_look(monkeypatch: pytest.MonkeyPatch, act: Callable[[FlowerCluster], None]) -> None:
    """Call `act` with the cluster whenever it looks at the run's status."""
    real_status = FlowerCluster.status

    def status(self: FlowerCluster, run_id: int) -> Any:
        act(self)
        return real_status(self, run_id)

    monkeypatch.setattr(FlowerCluster, "status", status)


def kill_training(
    flower: FlowerCluster, folder: Path, server_round: int, killed: list[int]
) -> None:
    """SIGKILL client 0's processes in a round: round 0 is on record when enrolment is over."""
    if len(read_metrics(folder)) != server_round:
        return
    for process in flower.client_processes(0):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            killed.append(process)
