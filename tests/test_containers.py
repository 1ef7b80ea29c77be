"""docker/: a federation in containers, with and without TLS, by the commands of the README."""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_base import base_image, require_engine
from open_ports import OPEN_PORTS

pytestmark = pytest.mark.docker

SECONDS = 400
# As few as RAGE needs to tell a liar: a container's start is most of what it costs.
CLIENTS, BYZANTINE = 3, 1
LIAR = CLIENTS
ROUNDS = 3
_FLEET, _CONTROL, _APPS, _COLLUSION = 9092, 9093, 9091, 9095


@pytest.fixture(scope="module")
def project() -> Iterator[str]:
    """A name for images, containers and networks; all of that name are removed afterwards."""
    require_engine()
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60)
    if plugin.returncode and shutil.which("docker-compose") is None:
        pytest.skip("there is no Docker Compose, neither as plugin nor as docker-compose")
    name = f"blackthorn-test-{uuid.uuid4().hex[:8]}"
    yield name
    for target in ("server", "client", "byzantine"):
        image = f"{name}-{target}"
        subprocess.run(
            ["docker", "image", "rm", "--force", image], capture_output=True, timeout=120
        )
    left = subprocess.run(
        ["docker", "ps", "--all", "--quiet", "--filter", f"name={name}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert left.stdout == ""


def make(repository: Path, env: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=repository,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("tls", ["", "1"], ids=["plain", "tls"])
def test_a_federation_runs_to_its_end(
    repository: Path, project: str, tmp_path: Path, tls: str
) -> None:
    settings = {
        "PROJECT": project,
        "DEPLOYMENT": str(tmp_path / "deployment"),
        "BASE_IMAGE": base_image(repository),
        "CLIENTS": str(CLIENTS),
        "BYZANTINE": str(BYZANTINE),
        "TLS": tls,
    }
    env = {**os.environ, **settings}
    recipe = shutil.copy(repository / "recipes" / "demo.toml", tmp_path / "short.toml")
    with Path(recipe).open("a") as stream:
        stream.write('\noutput-dir = "runs/short"\n')
    lines = (
        Path(recipe).read_text().replace("num-server-rounds = 15", f"num-server-rounds = {ROUNDS}")
    )
    Path(recipe).write_text(lines)
    try:
        make(repository, env, "compose-up")
        said = make(repository, env, "compose-run", f"RECIPE={recipe}")
        folder = tmp_path / "deployment" / "runs" / "short"
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["rounds_completed"]) == ("completed", ROUNDS), said
        replies = (CLIENTS + BYZANTINE) * ROUNDS
        assert summary["clients"] == {"invited": replies, "replied": replies, "rejected": 0}
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert all(LIAR in entry["filtered"] for entry in entries[1:])
        check_isolation(project)
        status = subprocess.run(
            [str(repository / "docker" / "federation"), "status"],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        assert status.count("online") == CLIENTS + BYZANTINE, status
        assert (f"client-{LIAR}" in status) == bool(tls)
    finally:
        make(repository, env, "compose-down")


def check_isolation(project: str) -> None:
    """From a client's container only the Fleet port answers; nobody is root; liars meet alone."""
    names = subprocess.run(
        ["docker", "ps", "--filter", f"name={project}", "--format", "{{.Names}}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert len(names) == CLIENTS + BYZANTINE + 3
    (client,) = [name for name in names if "client-0" in name]
    ports = map(str, (_APPS, _FLEET, _CONTROL, 9094, 9099))
    reached = inside(client, "python", "-c", OPEN_PORTS, "superlink", *ports)
    assert reached.split() == [str(_FLEET)]
    assert inside(client, "id", "-u").strip() != "0"
    # Only the liars know the place where liars meet.
    assert inside(client, "python", "-c", OPEN_PORTS, "collusion", str(_COLLUSION)) == ""
    (liar,) = [name for name in names if f"client-{LIAR}" in name]
    assert inside(liar, "python", "-c", OPEN_PORTS, "collusion", str(_COLLUSION)).split() == [
        str(_COLLUSION)
    ]
    logs = inside(liar, "sh", "-c", "cat /app/logs/*.log")
    assert "attacks alone" not in logs


def inside(container: str, *command: str) -> str:
    done = subprocess.run(
        ["docker", "exec", container, *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
