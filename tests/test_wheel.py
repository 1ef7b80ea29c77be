"""The built wheel in somebody else's Flower project, which has folders named like ours.

The wheel is installed into an environment of its own that borrows the dependencies of this one,
but not the checkout: nothing here runs code of ours that is not in the wheel.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from packaging.requirements import Requirement
from quickstart_project import PROJECT

from blackthorn.installation import code_of

SECONDS = 240.0

PACKAGES = (
    *("attacks", "client_app", "experiments", "flower_port", "launch"),
    *("recording", "reporting", "secure_aggregation", "server_app", "settings"),
    *("simulation", "strategies", "tasks"),
)

# The folders of what is installed here.
DEPENDENCIES = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def call(*command: str | Path, **options: Any) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        **options,
    )
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills, once for all of pytest's processes that ask for it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, made = root / name, root / f"{name}.made"
    with FileLock(root / f"{name}.lock", timeout=3 * SECONDS):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="module")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows or would take in, apart from the checkout."""

    def copy(source: Path) -> None:
        listed = call(
            *("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"), cwd=repository
        )
        for name in filter(None, listed.split("\0")):
            if (repository / name).exists():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, source / name, follow_symlinks=False)

    return made_once(tmp_path_factory, "source", copy)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of these files."""

    def build(target: Path) -> None:
        command = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
        call(*command, "--outdir", target, source)

    (built,) = made_once(tmp_path_factory, "wheel", build).iterdir()
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel installed, and no checkout in sight."""

    def install(folder: Path) -> None:
        installed(folder / "venv", wheel)

    folder = made_once(tmp_path_factory, "environment", install)
    return folder / "venv" / "bin" / "python"


def installed(
    environment: Path,
    *what: str | Path,
    dependencies: Sequence[str] = DEPENDENCIES,
) -> Path:
    """The interpreter of a new environment with `what` installed beside these folders' packages."""
    call(sys.executable, "-m", "venv", "--without-pip", environment)
    interpreter = environment / "bin" / "python"
    (packages,) = (environment / "lib").glob("python3.*/site-packages")
    # A path file names folders and reads no other path files in them, such as the one that an
    # editable installation of this checkout leaves behind.
    (packages / "_dependencies.pth").write_text("\n".join(dependencies) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "-q")
    here = ("--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation")
    call(*pip, *here, "--disable-pip-version-check", *what)
    return interpreter


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it depends on, and no extra."""

    def install(folder: Path) -> None:
        installed(folder / "venv", wheel, dependencies=())
        (packages,) = (folder / "venv" / "lib").glob("python3.*/site-packages")
        (built,) = distributions(name="blackthorn", path=[str(packages)])
        for part in needed_by(built):
            for file in part.files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (packages / top).exists():
                    (packages / top).symlink_to(Path(str(part.locate_file(top))))

    folder = made_once(tmp_path_factory, "light", install)
    return folder / "venv" / "bin" / "python"


def needed_by(root: Distribution) -> list[Distribution]:
    """The distributions that this one's installation brings along."""
    found: dict[str, Distribution] = {}
    # With the extras that are asked for.
    waiting = [(root, frozenset[str]())]
    while waiting:
        part, extras = waiting.pop()
        for text in part.requires or ():
            need = Requirement(text)
            wanted = [{"extra": extra} for extra in extras or {""}]
            if need.marker is not None and not any(map(need.marker.evaluate, wanted)):
                continue
            other = distribution(need.name)
            if need.extras or need.name not in found:
                found[need.name] = other
                waiting.append((other, frozenset(need.extras)))
    return list(found.values())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the project in it."""
    folder = tmp_path / "project"
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    shutil.copy2(Path(__file__).with_name("harness") / "memory_grid.py", folder)
    return folder


def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a newcomer: nothing of ours in it."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
    return {
        **kept,
        "HOME": str(tmp_path),
        "FLWR_HOME": str(tmp_path / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "SAID": str(tmp_path / "said.json"),
    }


def run_project(python: Path, project: Path, script: str) -> None:
    """Run one of the project's scripts and check what its server said."""
    surroundings = environment(project.parent)
    call(python, project / script, cwd=project, env=surroundings)
    said = json.loads(Path(surroundings["SAID"]).read_text())

    installed = python.parent.parent.resolve()
    for name, file in said["files"].items():
        home = installed if name.startswith("blackthorn") else project.resolve()
        assert Path(file).resolve().is_relative_to(home), f"{name} is {file}"
    assert {"blackthorn.strategies.base", "blackthorn.attacks.registry"} <= said["files"].keys()
    assert {"strategies.schedule", "attacks", "task"} <= said["files"].keys()

    accepted = {"invited": 5, "accepted": 5, "rejected": 0, "filtered": 1}
    assert said["rounds"] == {"1": accepted, "2": accepted}
    assert said["rage"] > 0.9
    assert said["evaluated"] > 0.9
    assert said["mean"] < 0.75


def test_the_wheel_holds_the_app_and_nothing_at_the_top_but_blackthorn(
    wheel: Path, repository: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"blackthorn"}
    recipes = {
        f"blackthorn/{path.relative_to(repository).as_posix()}"
        for path in (repository / "recipes").rglob("*.toml")
    }
    assert recipes
    assert recipes <= set(names)
    assert {"blackthorn/pyproject.toml", "blackthorn/README.md", "blackthorn/LICENSE"} <= set(names)
    modules = {
        f"blackthorn/{path.relative_to(repository).as_posix()}"
        for package in (*PACKAGES, "recipes")
        for path in (repository / package).rglob("*.py")
    }
    assert "blackthorn/py.typed" in names
    own = {"__init__", "__main__", "installation", "randomness", "wire"}
    assert {name for name in names if name.endswith(".py")} == modules | {
        f"blackthorn/{name}.py" for name in own
    }
    assert len(names) == len(set(names))
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_a_source_distribution_gives_the_same_wheel(
    wheel: Path, source: Path, tmp_path: Path
) -> None:
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, source)
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(tmp_path / wheel.name) as other:
        assert sorted(other.namelist()) == sorted(archive.namelist())
        for name in archive.namelist():
            assert other.read(name) == archive.read(name), name


def test_the_images_are_built_from_all_that_the_wheel_holds(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    (package,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    links = [path for path in (repository / package).iterdir() if path.is_symlink()]
    needed = {package, *(path.resolve().relative_to(repository).as_posix() for path in links)}
    assert {"flower_port", "strategies", "pyproject.toml"} <= needed
    let_through = {
        line.removeprefix("!")
        for line in (repository / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert needed - let_through == set()


SAME = """
import importlib, importlib.util, json, sys
from blackthorn.installation import CODE
from blackthorn.simulation import engine
from blackthorn.strategies import Aggregate
from blackthorn.strategies.aggregation import Aggregate as the_same
assert Aggregate is the_same
for package in sys.argv[1:]:
    importlib.import_module(f"blackthorn.{package}")
print(json.dumps([CODE, [p for p in sys.argv[1:] if importlib.util.find_spec(p) is not None]]))
"""


def test_a_wheel_and_a_checkout_have_the_same_code_under_one_name(
    python: Path, source: Path, tmp_path: Path
) -> None:
    """Installed either way: all is there as `blackthorn`, and nothing under a name of its own."""
    surroundings = environment(tmp_path)
    editable = installed(tmp_path / "venv", "--editable", source)
    for interpreter in (python, editable):
        said = call(interpreter, "-c", SAME, *PACKAGES, cwd=tmp_path, env=surroundings)
        assert json.loads(said) == [code_of(source / "blackthorn"), []]


def test_a_changed_file_is_another_code(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "blackthorn"
    shutil.copytree(source / "blackthorn", there)
    assert code_of(there) == code_of(source / "blackthorn")
    with (there / "attacks" / "registry.py").open("a") as stream:
        stream.write("\n")
    assert code_of(there) != code_of(source / "blackthorn")


def test_the_library_works_in_a_project_with_strategies_of_its_own(
    python: Path, project: Path
) -> None:
    run_project(python, project, "in_memory.py")


@pytest.mark.deployment
def test_such_a_project_runs_in_flower_s_simulation(python: Path, project: Path) -> None:
    run_project(python, project, "simulate.py")


def test_the_command_works_from_the_wheel(python: Path, project: Path) -> None:
    """Also in a folder that has packages named like ours."""
    surroundings = environment(project.parent)
    said = call(python, "-m", "blackthorn", "keys", cwd=project, env=surroundings)
    assert "num-server-rounds = 10" in said
    script = python.with_name("blackthorn")
    assert call(script, "keys", cwd=project, env=surroundings) == said
    own = call(python, "-c", "import blackthorn; print(blackthorn.__version__)", cwd=project)
    said = call(script, "--version", cwd=project, env=surroundings)
    assert said.startswith(f"blackthorn {own.strip()} (code ")


def test_a_recipe_of_the_wheel_runs(python: Path, project: Path) -> None:
    (recipe,) = python.parent.parent.glob(
        "lib/python3.*/site-packages/blackthorn/recipes/demo.toml"
    )
    folder = project.parent / "run"
    command = (python, "-m", "blackthorn", "simulate", recipe)
    options = ("--set", "num-server-rounds=1", "--output-dir", folder)
    call(*command, *options, cwd=project, env=environment(project.parent))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds_completed"]) == ("completed", 1)


EVERY_MODULE = """
import importlib, sys
from pathlib import Path
import blackthorn
(root,) = map(Path, blackthorn.__path__)
for room in sys.argv[1:]:
    for path in sorted((root / room).rglob("*.py")):
        name = ".".join(["blackthorn", *path.relative_to(root).with_suffix("").parts])
        if not name.startswith(NEED_AN_EXTRA):
            importlib.import_module(name.removesuffix(".__init__"))
assert not {"matplotlib", "sklearn", "torchvision", "PIL", "ray"} & sys.modules.keys()
"""

# Imported by what needs the extra: with it comes the Flower whose protocol the rogue speaks.
NEED_AN_EXTRA = ("blackthorn.attacks.rogue", "blackthorn.recording.tensorboard_events")
LIGHT = ("strategies", "client_app", "attacks", "tasks", "settings", "simulation", "recording")


def test_without_an_extra_the_library_imports_and_runs(light: Path, project: Path) -> None:
    program = f"NEED_AN_EXTRA = {NEED_AN_EXTRA!r}\n{EVERY_MODULE}"
    call(light, "-c", program, *LIGHT, cwd=project.parent, env=environment(project.parent))
    run_project(light, project, "in_memory.py")


def test_without_the_extra_a_command_says_which_it_needs(light: Path, tmp_path: Path) -> None:
    surroundings = environment(tmp_path)
    command = (light.with_name("blackthorn"), "simulate", "recipe.toml")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path, env=surroundings
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: blackthorn simulate needs arviz, ")
    assert line.endswith('not installed here: pip install "blackthorn[app]"')
    for words in (("simulate", "--help"), ("keys",), ("calibrate", "--help")):
        call(command[0], *words, cwd=tmp_path, env=surroundings)


def test_without_the_extra_the_serverapp_says_which_it_needs(light: Path, tmp_path: Path) -> None:
    program = "import blackthorn.server_app.app"
    done = subprocess.run(
        (light, "-c", program), capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path
    )
    said = done.stderr.splitlines()[-1]
    assert said.endswith('not installed here: pip install "blackthorn[app]"')
    assert "the ServerApp needs " in said
