"""What is the server's business alone stays there, and secrets have no place in a configuration."""

import ast
import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from shared_cluster import shared_cluster

from blackthorn.flower_port.programs import APP_ID
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.flower_cluster import Node
from blackthorn.settings.config import (
    ConfigError,
    RunConfig,
    make_config,
    read_recipe,
)
from blackthorn.settings.key_facts import server_keys

CLIENTS_CODE = ("client_app", "tasks", "attacks")
# A client's program that writes down what it was told, and then is Flower's.
TELLING_PROGRAM = """
import json
from pathlib import Path
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

def main():
    load_fn = run_clientapp.get_load_client_app_fn
    def telling(*args, **kwargs):
        def load(*bundle):
            app = load_fn(*args, **kwargs)(*bundle)
            def call(message, context):
                told = json.dumps(dict(context.run_config))
                Path(context.node_config["told"]).write_text(told)
                return app(message, context)
            return call
        return load
    run_clientapp.get_load_client_app_fn = telling
    flwr_clientapp()
"""


def test_what_says_where_the_server_writes_is_the_servers() -> None:
    assert {"output-dir", "ledger", "resume", "mlflow-uri", "round-timeout"} <= set(server_keys())
    # What clients compute with, or what a claim rests on, is everybody's.
    assert not {"seed", "local-lr", "epsilon", "clip-norm", "data-dir"} & set(server_keys())


def test_no_code_of_the_clients_reads_the_server_s_keys(repository: Path) -> None:
    names = {key.replace("-", "_") for key in server_keys()}
    for package in CLIENTS_CODE:
        for path in (repository / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "config":
                    assert node.attr not in names, f"{path}:{node.lineno}"


def test_a_configuration_is_valid_without_them(repository: Path) -> None:
    """A client checks what it is sent, in which they have their defaults."""
    changed = {"min-replies": 4, "oversample": 1.5, "keep-samples": "reservoir", "fail-after": 1}
    fixed = {"participation": "fixed", "clients-per-round": 4, "below-quorum": "fail"}
    everything = [{**changed, **fixed}]
    everything += [read_recipe(path) for path in (repository / "recipes").glob("*.toml")]
    for values in everything:
        make_config(values)
        make_config({key: value for key, value in values.items() if key not in server_keys()})


def test_the_superlink_knows_our_app(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert f"{project['tool']['flwr']['app']['publisher']}/{project['project']['name']}" == APP_ID


@pytest.mark.deployment
@pytest.mark.skipif(sys.platform != "linux", reason="the cluster's programs are forked")
def test_the_server_s_keys_do_not_reach_a_client(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real SuperLink and SuperNode; the ServerApp has them all, the ClientApp the defaults."""
    (tmp_path / "telling.py").write_text(TELLING_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = tmp_path / "told.json"
    ledger, tracker = tmp_path / "secret-ledger.json", f"sqlite:///{tmp_path / 'secret.db'}"
    config = recipe_config(
        repository / "recipes" / "dp-digits.toml",
        (),
        {
            "num-clients": 1,
            "participation": "full",
            "sample-rate": 1.0,
            "num-server-rounds": 1,
            "output-dir": str(tmp_path / "run"),
            "ledger": str(ledger),
            "mlflow-uri": tracker if importlib.util.find_spec("mlflow") else "",
            "round-timeout": 61.0,
            "report": False,
        },
    )
    nodes = [Node(config={"told": str(told)}, program="telling:main")]
    with shared_cluster(nodes, tmp_path / "cluster") as run:
        run(config)
    assert ledger.exists()
    seen = json.loads(told.read_text())
    assert seen["clip-norm"] == config.clip_norm
    assert {key: seen[key] for key in server_keys()} == {
        key: RunConfig.model_fields[key.replace("-", "_")].default for key in server_keys()
    }
    assert str(tmp_path) not in told.read_text()


@pytest.mark.parametrize(
    "secret",
    [
        "http://me:hunter2@mlflow.example.org:5000",
        "https://hunter2@mlflow.example.org",
        "me:hunter2@mlflow.example.org",
        "postgresql://me:hun/ter2@db/mlflow",
        "mysql://db/mlflow?user=me&password=hunter2",
        "http://mlflow.example.org/?access_token=hunter2",
        "http://mlflow.example.org/?sig=hunter2",
        "http://mlflow.example.org/?auth=hunter2",
        "http://mlflow.example.org/?key=hunter2",
        "http://mlflow.example.org/?bearer=hunter2",
        "http://mlflow.example.org/?hunter2",
        "http://mlflow.example.org/#token=hunter2",
        "http://mlflow.example.org/#hunter2",
        "http://mlflow.example.org/;password=hunter2",
        "HTTP://mlflow.example.org/a;p=hunter2/b",
        " http://mlflow.example.org/?x=hunter2",
        "mlflow.example.org/?x=1&Api-Key=hunter2",
        "mlflow.example.org/#bearer=hunter2",
        "Server=db;Pwd=hunter2",
    ],
)
@pytest.mark.parametrize("key", ["mlflow-uri", "data-dir", "output-dir", "task"])
def test_credentials_are_refused_and_not_shown(key: str, secret: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({key: secret}))
    for attempt in (
        lambda: recipe_config(recipe),
        lambda: recipe_config(None, [f"{key}={secret}"]),
        lambda: make_config({"local-lr": -1.0, key: secret}),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        said = str(caught.value)
        assert said.startswith(f"{key} is not allowed to hold a user's name or password")
        assert "MLFLOW_TRACKING_USERNAME" in said
        assert "MLFLOW_TRACKING_PASSWORD" in said
        assert "hun" not in said
        assert "\n" not in said


@pytest.mark.parametrize(
    "value",
    [
        "http://mlflow.example.org:5000",
        "http://[::1]:5000/a@b",
        "sqlite:////home/me@work/mlflow.db",
        "/data/me@work",
        "databricks",
    ],
)
def test_what_only_looks_like_credentials_is_allowed(value: str) -> None:
    assert make_config({"mlflow-uri": value}).mlflow_uri == value


@pytest.mark.parametrize("value", ["/data/what?/a;b/c#1", "runs/key=1", "/data/a?b=c"])
def test_a_path_may_have_any_name(value: str) -> None:
    assert make_config({"data-dir": value}).data_dir == value
