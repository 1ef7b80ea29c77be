"""docker/: a federation in containers, with and without TLS, by the commands of the README."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from container_base import base_image, require_engine
from open_ports import OPEN_PORTS
from process_watch import until

from blackthorn.recording.run_folder import read_metrics, read_summary

pytestmark = pytest.mark.docker

# For all of a run of which containers are killed, on a machine that has other things to do.
SECONDS = 900
# As few as RAGE needs to tell an attacker: a container's start is most of what it costs.
CLIENTS, BYZANTINE = 3, 1
ATTACKER = CLIENTS
ROUNDS, STRUCK_ROUNDS = 3, 10
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


@dataclass
class Federation:
    """A federation in containers; `environment` is what its commands are given."""

    repository: Path
    project: str
    folder: Path
    environment: dict[str, str]

    def make(self, *arguments: str) -> str:
        return self._run("make", "--no-print-directory", *arguments)

    def command(self, *arguments: str) -> str:
        return self._run(str(self.repository / "docker" / "federation"), *arguments)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.repository,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        return done.stdout

    def recipe(self, name: str, rounds: int) -> str:
        """The demo's recipe with so many rounds, whose folder has that name."""
        text = (self.repository / "recipes" / "demo.toml").read_text()
        changed = text.replace("num-server-rounds = 15", f"num-server-rounds = {rounds}")
        assert changed != text
        path = self.folder / f"{name}.toml"
        path.write_text(f'{changed}\noutput-dir = "runs/{name}"\n')
        return f"RECIPE={path}"

    def run_folder(self, name: str) -> Path:
        return self.folder / "deployment" / "runs" / name

    def containers(self) -> list[str]:
        """Those that run, but for the operator's."""
        return self._containers("oneoff=False")

    def container(self, service: str) -> str:
        (identity,) = self._containers(f"service={service}")
        return identity

    def reboot(self) -> None:
        """As the machine would: nobody has time to say goodbye, and all come back at once."""
        containers = self.containers()
        docker("kill", *containers)
        docker("start", *containers)

    def logs(self) -> str:
        """What everybody wrote: it goes with the containers."""
        read = "tail -n 40 /app/logs/*.log; grep -v Pull.*node_id= /state/logs/*.log | tail -n 80"
        told = [docker("exec", each, "sh", "-c", read, check=False) for each in self.containers()]
        return "\n".join(told)

    def _containers(self, *labels: str) -> list[str]:
        wanted = [f"--filter=label=com.docker.compose.{one}" for one in labels]
        project = f"--filter=label=com.docker.compose.project={self.project}"
        return docker("ps", "--quiet", project, *wanted).split()


@contextmanager
def federation(repository: Path, project: str, folder: Path, **more: str) -> Iterator[Federation]:
    """A federation that is up, and down again when the block is left."""
    settings = {
        "PROJECT": project,
        "DEPLOYMENT": str(folder / "deployment"),
        "BASE_IMAGE": base_image(repository),
        "CLIENTS": str(CLIENTS),
        "BYZANTINE": str(BYZANTINE),
        **more,
    }
    one = Federation(repository, project, folder, {**os.environ, **settings})
    try:
        one.make("compose-up")
        yield one
    except BaseException:
        print(one.logs())
        raise
    finally:
        one.make("compose-down")


def test_a_federation_runs_to_its_end(repository: Path, project: str, tmp_path: Path) -> None:
    with federation(repository, project, tmp_path) as one:
        said = one.make("compose-run", one.recipe("short", ROUNDS))
        check_whole(one.run_folder("short"), ROUNDS, said)
        check_isolation(one)
        assert f"client-{ATTACKER}" not in status(one)


# Once the run has so many rounds: what happens to the server's container, or to all of them.
STRUCK = {
    1: lambda one: docker("exec", one.container("server"), "sh", "-c", "kill -9 -1", check=False),
    4: lambda one: docker("kill", one.container("server")) and one.make("compose-up"),
    7: lambda one: one.reboot(),
}


def test_over_tls_a_run_outlives_its_containers(
    repository: Path, project: str, tmp_path: Path
) -> None:
    """One that dies is started again by the engine, one that was killed by `compose-up`."""
    with federation(repository, project, tmp_path, TLS="1") as one:
        folder = one.run_folder("long")
        with ThreadPoolExecutor() as pool:
            run = pool.submit(one.make, "compose-run", one.recipe("long", STRUCK_ROUNDS))

            def reached(finished: int) -> bool:
                return last_round(folder) >= finished or run.done()

            for finished, strike in STRUCK.items():
                until(partial(reached, finished), SECONDS)
                assert not run.done(), run.result()
                strike(one)
            said = run.result(SECONDS)
        check_whole(folder, STRUCK_ROUNDS, said)
        check_isolation(one)
        assert f"client-{ATTACKER}" in status(one)
        check_secure_aggregation(one)


def check_whole(folder: Path, rounds: int, said: str) -> None:
    """Completed; every round is on record once, had everybody, and counted the attacker in none."""
    summary = read_summary(folder)
    assert summary is not None, said
    assert (summary["status"], summary["rounds_completed"]) == ("completed", rounds), said
    entries = list(read_metrics(folder))
    assert [entry["round"] for entry in entries] == list(range(rounds + 1))
    told = [(entry["round"], entry["replied"], entry["rejected"]) for entry in entries]
    assert all(ATTACKER in entry["filtered"] for entry in entries[1:]), told
    replies = (CLIENTS + BYZANTINE) * rounds
    assert summary["clients"] == {"invited": replies, "replied": replies, "rejected": 0}


def check_secure_aggregation(one: Federation) -> None:
    """Its clients' updates are masked, so that no attacker may be among them."""
    docker("stop", one.container(f"client-{ATTACKER}"))
    recipe = one.folder / "masked.toml"
    recipe.write_text(
        'algorithm = "secure-dp-fedavg"\ntask = "digits"\nparticipation = "full"\n'
        "num-server-rounds = 2\nclip-norm = 3.0\nnoise-multiplier = 1.0\ndelta = 1e-4\n"
        'secure-dropouts = 0.0\noutput-dir = "runs/masked"\n'
    )
    said = one.command("run", str(recipe), "--clients", str(CLIENTS))
    summary = read_summary(one.run_folder("masked"))
    assert summary is not None, said
    assert (summary["status"], summary["rounds_completed"]) == ("completed", 2), said
    assert "against everybody, the server too" in summary["privacy"]["claim"]
    assert all("skipped" not in entry for entry in read_metrics(one.run_folder("masked"))), said


def last_round(folder: Path) -> int:
    return max((entry["round"] for entry in read_metrics(folder)), default=-1)


def status(one: Federation) -> str:
    """Who is connected: all are."""
    said = one.command("status")
    assert said.count("online") == CLIENTS + BYZANTINE, said
    return said


def check_isolation(one: Federation) -> None:
    """From a client only the Fleet port answers; nobody is root; attackers meet alone."""
    assert len(one.containers()) == CLIENTS + BYZANTINE + 2
    client, attacker = one.container("client-0"), one.container(f"client-{ATTACKER}")
    ports = map(str, (_APPS, _FLEET, _CONTROL, 9094, 9099))
    reached = inside(client, "python", "-c", OPEN_PORTS, "superlink", *ports)
    assert reached.split() == [str(_FLEET)]
    assert inside(client, "id", "-u").strip() != "0"
    # Only the attackers know the place where attackers meet.
    assert inside(client, "python", "-c", OPEN_PORTS, "collusion", str(_COLLUSION)) == ""
    assert inside(attacker, "python", "-c", OPEN_PORTS, "collusion", str(_COLLUSION)).split() == [
        str(_COLLUSION)
    ]
    logs = inside(attacker, "sh", "-c", "cat /app/logs/*.log")
    assert "attacks alone" not in logs


def inside(container: str, *command: str) -> str:
    return docker("exec", container, *command)


def docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout
