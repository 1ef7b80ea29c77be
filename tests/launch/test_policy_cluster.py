"""A policy in a real cluster: kept by the client's own code, whatever comes with the run."""

import sys
from pathlib import Path

import pytest
from shared_cluster import shared_cluster

from blackthorn.client_app.client_ledger import ClientLedger
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.app_bundle import COMPONENTS, stage_app
from blackthorn.launch.federation.byzantine_nodes import cluster_nodes, kept_policies
from blackthorn.recording.run_folder import read_metrics

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(sys.platform != "linux", reason="the cluster's programs are forked"),
]

ROUNDS = 3
# What a server that deviates puts into the ClientApp that it distributes.
SPYING = """
import os
from pathlib import Path

Path({folder!r}, os.environ["BLACKTHORN_NODE"]).touch()
"""


def test_a_client_with_a_policy_runs_its_own_code_and_stops_at_its_limit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients, the second with a policy of two rounds; the server's code leaves a mark."""
    seen, app = tmp_path / "seen", tmp_path / "app"
    seen.mkdir()
    stage_app(repository, COMPONENTS, app)
    with (app / "client_app" / "app.py").open("a") as stream:
        stream.write(SPYING.format(folder=str(seen)))
    monkeypatch.setattr("blackthorn.launch.commands.cluster.APP_ROOT", app)
    policy = tmp_path / "policy.toml"
    policy.write_text("max-rounds = 2\n")
    config = recipe_config(
        repository / "recipes" / "demo.toml",
        (),
        {
            "num-clients": 2,
            "num-byzantine": 0,
            "attack": "none",
            "aggregator": "mean",
            "num-server-rounds": ROUNDS,
            "output-dir": str(tmp_path / "run"),
            "report": False,
        },
    )
    nodes = [
        cluster_nodes(config, (), "", {})[0],
        cluster_nodes(config, (), "", {}, kept_policies(config, policy, ()))[1],
    ]
    with shared_cluster(nodes, tmp_path / "cluster") as run:
        summary = run(config)
    assert summary["status"] == "completed"
    entries = read_metrics(tmp_path / "run")[1:]
    assert [entry["replied"] for entry in entries] == [2, 2, 1]
    (rejection,) = entries[-1]["rejected"]
    assert rejection["client"] == 1
    assert "the client has sent as many rounds as its max-rounds allows" in rejection["reason"]
    assert [path.name for path in seen.iterdir()] == ["0"]
    assert ClientLedger(tmp_path / "policy.client-1.ledger.json").read().rounds == 2
    said = "".join(path.read_text() for path in (tmp_path / "cluster" / "logs").glob("*.log"))
    assert "client 1 does not train in run" in said
    assert "round 3 of all runs is not allowed: at most 2" in said
