"""Two hundred rounds over gRPC with a client that turns its coat every round, and dying nodes.

Six clients, the last a rogue whose behaviour is drawn anew each round; every twenty rounds an
honest SuperNode is killed as by a power cut, and started again. BLACKTHORN_SOAK_ROUNDS is for a
shorter or a longer soak.
"""

import os
from pathlib import Path

import pytest
from process_memory import MemoryWatch
from rich.console import Console
from shared_cluster import on_every_look

from blackthorn.attacks.rogue.__main__ import at_random
from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.flower_cluster import FlowerCluster
from blackthorn.recording.run_folder import read_metrics

pytestmark = [pytest.mark.deployment, pytest.mark.slow]

ROUNDS = int(os.environ.get("BLACKTHORN_SOAK_ROUNDS", "200"))
CLIENTS, ROGUE = 6, 5
KILL_EVERY = 20
DEADLINE, SLACK = 5.0, 5.0
SEED = 6
# A leak of a 500 MB reply, or of a hundredth of it, or of half a megabyte a round, shows.
ALLOWED_GROWTH = 50_000_000
LONG_LIVED = ("flower-superlink", "flwr-serverapp", "flower-superexec", "flower-supernode")


class Reaper:
    """Kills the honest nodes, one after the other, and starts each again once it is dead."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dead: list[int] = []
        self.killed: dict[int, int] = {}

    def act(self, flower: FlowerCluster) -> None:
        for node in list(self._dead):
            if node in flower.deaths():
                flower.restart_node(node)
                self._dead.remove(node)
        done = max((entry["round"] for entry in read_metrics(self._folder)), default=0)
        due = done // KILL_EVERY * KILL_EVERY
        if due and due < ROUNDS and due not in self.killed:
            node = len(self.killed) % ROGUE
            flower.kill_node(node)
            self.killed[due] = node
            self._dead.append(node)

    def absent(self, server_round: int) -> set[int]:
        """Clients that a kill may keep away from a round: the last two that were killed."""
        return {node for due, node in self.killed.items() if 0 <= server_round - due <= 40}


def test_no_leak_and_no_lost_round(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, reaper = MemoryWatch(), Reaper(tmp_path)

    def look(flower: FlowerCluster) -> None:
        watch.look(flower.id)
        reaper.act(flower)

    on_every_look(monkeypatch, look)
    values = {
        "num-clients": CLIENTS,
        "num-byzantine": 1,
        "num-server-rounds": ROUNDS,
        "local-steps": 2,
        "round-timeout": DEADLINE,
        "seed": SEED,
        "output-dir": str(tmp_path),
    }
    config = recipe_config(repository / "recipes" / "demo.toml", (), values)
    summary = cluster(config, Console(quiet=True), rogue="random")
    print(watch.describe())
    assert summary["status"] == "completed"
    assert len(reaper.killed) == (ROUNDS - 1) // KILL_EVERY
    entries = read_metrics(tmp_path)[1:]
    assert [entry["round"] for entry in entries] == list(range(1, ROUNDS + 1))
    choose = at_random(SEED)
    for entry in entries:
        server_round = entry["round"]
        assert not entry.get("skipped"), entry
        assert entry["seconds"]["training"] <= DEADLINE + SLACK, entry
        rejected = {r["client"] for r in entry["rejected"]}
        assert rejected <= {ROGUE} | reaper.absent(server_round), entry
        if choose(server_round) not in ("honest", "huge"):
            assert ROGUE in rejected, entry
    for program in LONG_LIVED:
        assert watch.late_growth(program) < ALLOWED_GROWTH, watch.describe()
