"""What a Flower App Bundle holds: the app's components, own code that a key names, nothing else."""

import io
import shutil
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from blackthorn.installation import APP_ROOT
from blackthorn.launch.federation.app_bundle import COMPONENTS, bundle_own_code, stage_app

# What Flower puts into every bundle itself.
FLOWERS = {"pyproject.toml", ".info/CONTENT"}
# Of a server that was run in the checkout, of a person who works in it, of a client.
STRAY = (
    "state/ledger.json",
    "state/guard/records.json",
    "state/runs/first/operator.jsonl",
    "client_app/ledger.json",
    "server_app/secrets.toml",
    "client_app/notes.md",
    "blackthorn-client-0/policy.ledger.json",
    "policy.toml",
    "mine.py",
    "secrets.yaml",
)


def members(app: Path) -> set[str]:
    """The files in the bundle that Flower makes of a folder."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        return set(bundle.namelist())


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A copy of the repository in which a federation was run."""
    copy = tmp_path / "checkout"
    environments = shutil.ignore_patterns(".*", "deployment", "runs")
    shutil.copytree(repository, copy, symlinks=True, ignore=environments)
    shutil.copy(repository / ".gitignore", copy)
    for name in STRAY:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    return copy


def test_flwr_run_in_a_checkout_sends_the_components_alone(checkout: Path) -> None:
    assert members(checkout) == {*COMPONENTS, *FLOWERS}
    # The stray files would have gone: nothing but the list keeps them back.
    project = checkout / "pyproject.toml"
    listed, _, rest = project.read_text().partition("fab-include = [")
    project.write_text(listed + rest.partition("]\n")[2])
    assert members(checkout) >= {*STRAY, "tests/conftest.py", "docs/deploy.md"}


@pytest.mark.parametrize("installed", [False, True])
def test_a_run_sends_the_components_and_the_own_code_that_its_keys_name(
    checkout: Path, tmp_path: Path, installed: bool
) -> None:
    staged = stage_app(APP_ROOT if installed else checkout, COMPONENTS, tmp_path / "staged")
    assert members(staged) == {*COMPONENTS, *FLOWERS, "LICENSE"}
    config = {"model": f"{checkout / 'mine.py'}:model", "aggregator": "auto"}
    sent = bundle_own_code(staged, config, ("model", "aggregator"))
    own = str(sent["model"]).partition(":")[0]
    assert own.endswith(".py")
    assert members(staged) == {*COMPONENTS, *FLOWERS, "LICENSE", own}
