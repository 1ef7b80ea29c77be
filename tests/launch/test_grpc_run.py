"""One real deployment in the quick tests: processes that talk over gRPC, one of them lying."""

from pathlib import Path

from rich.console import Console

from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.recording.run_folder import read_metrics


def test_rage_filters_the_attacker_of_a_cluster_in_every_round(
    repository: Path, tmp_path: Path
) -> None:
    options = {
        "num-clients": 4,
        "num-byzantine": 1,
        "num-server-rounds": 2,
        "output-dir": str(tmp_path),
    }
    config = recipe_config(repository / "recipes" / "demo.toml", (), options)
    summary = cluster(config, Console(quiet=True))
    assert summary["status"] == "completed"
    assert summary["clients"] == {"invited": 8, "replied": 8, "rejected": 0}
    assert [entry["filtered"] for entry in read_metrics(tmp_path)[1:]] == [[3], [3]]
