"""In a local cluster a policy is kept as by `blackthorn client`: each client knows its ledger."""

import shutil
from pathlib import Path

import pytest

from blackthorn.client_app.client_ledger import ClientLedger, LedgerUnusable
from blackthorn.client_app.permitting import Safeguards
from blackthorn.launch.federation.byzantine_nodes import cluster_nodes, kept_policies
from blackthorn.settings.config import ConfigError, RunConfig, make_config


@pytest.fixture
def config() -> RunConfig:
    return make_config({"num-clients": 3, "num-byzantine": 1, "attack": "sign-flip"})


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text("max-rounds = 5\n")
    return path


def test_a_cluster_client_whose_ledger_is_deleted_while_it_is_up_sends_nothing(
    config: RunConfig, policy: Path
) -> None:
    nodes = cluster_nodes(config, (), "", {}, kept_policies(config, policy, ()))
    assert ["policy" in node.config for node in nodes] == [True, True, False]
    for node in nodes[:2]:
        safeguards = Safeguards.of(node.config)
        assert safeguards is not None
        safeguards.admit_other(config)
        Path(str(node.config["ledger"])).unlink()
        with pytest.raises(LedgerUnusable, match="not the one that was there when"):
            safeguards.admit_other(config)


def test_a_cluster_is_refused_where_two_clients_would_share_one_ledger_by_a_copy(
    config: RunConfig, policy: Path
) -> None:
    first, second = (policy.with_suffix(f".client-{i}.ledger.json") for i in range(2))
    ClientLedger(first).change(lambda _: None)
    shutil.copy(first, second)
    with pytest.raises(ConfigError, match=f"--ledger: ledger {second} is a copy of {first}"):
        kept_policies(config, policy, ())
