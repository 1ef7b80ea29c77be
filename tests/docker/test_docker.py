"""In a container: the engine here can pull no image, so the host's own system is mounted."""

import io
import json
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_base import require_engine

pytestmark = pytest.mark.docker

SECONDS = 300


@pytest.fixture(scope="module")
def engine() -> str:
    return require_engine()


@pytest.fixture(scope="module")
def empty_image(engine: str) -> Iterator[str]:
    """An image with nothing in it, removed afterwards."""
    name = f"blackthorn-test-empty:{uuid.uuid4().hex}"
    archive = io.BytesIO()
    tarfile.open(fileobj=archive, mode="w").close()
    subprocess.run(
        [engine, "import", "-", name], input=archive.getvalue(), check=True, timeout=SECONDS
    )
    yield name
    subprocess.run([engine, "image", "rm", "--force", name], check=True, timeout=SECONDS)


def test_the_demo_recipe_runs_in_a_container_without_network(
    engine: str, empty_image: str, repository: Path, tmp_path: Path
) -> None:
    system = [Path(p) for p in ("/usr", "/bin", "/lib", "/lib64", "/etc") if Path(p).exists()]
    read_only = [*system, Path(sys.base_prefix), Path(sys.prefix), repository]
    mounts = [f"--volume={path}:{path}:ro" for path in read_only]
    name = f"blackthorn-test-{uuid.uuid4().hex}"
    command = [engine, "run", "--rm", "--name", name, "--network", "none", *mounts]
    command += [f"--volume={tmp_path}:/out", "--env", f"PYTHONPATH={repository}"]
    command += ["--env", "PYTHONDONTWRITEBYTECODE=1", "--tmpfs", "/tmp", empty_image]
    command += [sys.executable, "-m", "blackthorn", "simulate"]
    command += [str(repository / "recipes" / "demo.toml"), "--set", "num-server-rounds=3"]
    try:
        done = subprocess.run(
            [*command, "--output-dir", "/out/run"], capture_output=True, text=True, timeout=SECONDS
        )
    finally:
        subprocess.run([engine, "rm", "--force", name], capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["rounds_completed"] == 3
