"""Every module of ours has one name, blackthorn.…, and every process one copy of it.

Flower's components are the exception: it loads `client_app.app` and `server_app.app` from the
bundle, and these take their apps from the package that is installed.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from markdown_blocks import blocks_of
from memory_grid import MemoryGrid, silence

from blackthorn.client_app.clientapp import app as client_app
from blackthorn.installation import APP_ROOT, CODE, sent_from
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.app_bundle import COMPONENTS, stage_app
from blackthorn.server_app.serverapp import main
from blackthorn.settings.config import ConfigError, to_mapping
from blackthorn.strategies.enrolment import ClientRegistry
from blackthorn.strategies.enrolment_messages import CannotTakePart, read_enrolment
from blackthorn.wire import SERVER_CODE

FOLDERS = tuple(sorted(path.name for path in APP_ROOT.iterdir() if path.is_dir()))
PACKAGES = tuple(name for name in FOLDERS if (APP_ROOT / name / "__init__.py").is_file())
_ANY = "|".join(PACKAGES)
# As code says it, and as commands and settings do. Two tests have a project of somebody else's in
# them, which has folders named like ours.
BARE = re.compile(
    rf"(?m)(?:^|[\s;`\"'])(?:from (?:{_ANY})(?:\.\w+)* import\b|-m (?:{_ANY})\b)"
    rf"|(?:^|;)\s*import (?:{_ANY})\b"
)
QUOTED = re.compile(rf"[\"'](?!(?:client|server)_app\.app:app)((?:{_ANY})\.\w+)")
OTHER = "0.0.9 (code 0123456789ab)"
STRANGERS = ("tests/harness/quickstart_project.py", "tests/attacks/test_flwr_clientapp.py")


def imported(tree: ast.AST) -> Iterator[str]:
    """The absolute names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def sources(repository: Path, *suffixes: str) -> list[Path]:
    folders = (*PACKAGES, "benchmarks", "blackthorn", "docker", "docs", "recipes", "tests")
    places = [path for name in folders for path in (repository / name).rglob("*")]
    found = [path for path in (*repository.iterdir(), *places) if path.suffix in suffixes]
    assert len(found) > 10
    return [path for path in found if path.is_file()]


def bare(names: Iterator[str]) -> list[str]:
    return [name for name in names if name.partition(".")[0] in PACKAGES]


def test_no_file_imports_a_package_of_ours_by_its_bare_name(repository: Path) -> None:
    assert {"attacks", "strategies", "tasks"} < set(PACKAGES)
    for path in sources(repository, ".py"):
        assert bare(imported(ast.parse(path.read_text(encoding="utf-8")))) == [], path
    for path in sources(repository, ".md"):
        for block in blocks_of(path, path.name):
            if block.language == "python":
                assert bare(imported(ast.parse(block.text))) == [], block.name


def is_module(name: str) -> bool:
    place = APP_ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


def found(text: str) -> list[str]:
    """Bare names of packages and modules of ours in a text."""
    return [*BARE.findall(text), *(name for name in QUOTED.findall(text) if is_module(name))]


def test_no_text_names_one_by_its_bare_name(repository: Path) -> None:
    dockerfile = repository / "docker" / "Dockerfile"
    for path in (*sources(repository, ".py", ".md", ".toml"), dockerfile):
        name = path.relative_to(repository).as_posix()
        if name not in (*STRANGERS, "CHANGELOG.md", f"tests/{Path(__file__).name}"):
            assert found(path.read_text(encoding="utf-8")) == [], name


@pytest.mark.parametrize(
    "text",
    [
        "    from strategies import Aggregate",
        "x = 'import sys; from launch.cli import main'",
        "import attacks\n",
        "python -m attacks.rogue --help",
        'entry = "attacks.flwr_clientapp:main"',
    ],
)
def test_a_bare_name_in_a_text_is_found(text: str) -> None:
    assert found(text)
    assert not found(re.sub(rf"\b({_ANY})\b", r"blackthorn.\1", text, count=1))


# Loads the app as Flower does, runs one in this process, and tells which modules came from where.
LOADED = """
import json, os, sys
from pathlib import Path

from flwr.supercore.object_ref import load_app

bundle, repository, folder = map(Path, sys.argv[1:])
server = load_app("server_app.app:app", ImportError, bundle)
client = load_app("client_app.app:app", ImportError, bundle)

from rich.console import Console
from blackthorn.client_app.clientapp import app
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate

assert client is app
changes = {"num-server-rounds": 1, "output-dir": str(folder), "report": True}
simulate(recipe_config(repository / "recipes" / "demo.toml", (), changes), Console(quiet=True))
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print(json.dumps({name: os.path.realpath(file) for name, file in files.items() if file}))
"""


def test_a_process_that_runs_an_app_has_every_module_once(repository: Path, tmp_path: Path) -> None:
    bundle = stage_app(APP_ROOT, COMPONENTS, tmp_path / "bundle")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, bundle, repository, tmp_path / "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    files: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    tops = {name for name in files if name.partition(".")[0] in PACKAGES}
    assert tops == {"client_app", "client_app.app", "server_app", "server_app.app"}
    assert all(Path(files[name]).is_relative_to(bundle) for name in tops)
    ours = {name: file for name, file in files.items() if name.startswith("blackthorn")}
    assert {"blackthorn.strategies.aggregation", "blackthorn.simulation.engine"} <= ours.keys()
    own = [repository / name for name in ("blackthorn", *PACKAGES)]
    places = [f for f in files.values() if any(Path(f).is_relative_to(folder) for folder in own)]
    assert len(places) > 100
    assert sorted(places) == sorted(set(places))


def enrolment(repository: Path, asked: dict[str, str]) -> Message:
    """What client 3 answers to the server's question."""
    config = to_mapping(recipe_config(repository / "recipes" / "demo.toml", (), {}))
    question = Message(RecordDict({"config": ConfigRecord({"ask": "enrol", **asked})}), 5, "query")
    return client_app(question, Context(77, 5, {"client-id": 3}, RecordDict(), config))


def test_a_client_with_another_code_than_the_server_does_not_take_part(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = MemoryGrid({5: silence})
    ClientRegistry("query").refresh(grid, 5.0)
    (asked,) = (message.content.config_records["config"] for message in grid.sent)
    assert asked[SERVER_CODE] == CODE
    assert read_enrolment(enrolment(repository, {SERVER_CODE: CODE}))[0] == 3
    # A server of another kind says nothing of it.
    assert read_enrolment(enrolment(repository, {}))[0] == 3
    with pytest.raises(CannotTakePart) as refused:
        read_enrolment(enrolment(repository, {SERVER_CODE: OTHER}))
    told = f"this is Blackthorn {CODE}, the server has {OTHER}: install the same on both"
    assert (refused.value.client_id, str(refused.value)) == (3, told)
    assert f"client 3 cannot take part in run 77: {told}" in caplog.text


def test_a_server_refuses_a_run_that_another_code_has_sent(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = stage_app(APP_ROOT, COMPONENTS, tmp_path / "bundle")
    assert sent_from(bundle) == CODE
    assert sent_from(repository) is None
    project = bundle / "pyproject.toml"
    project.write_text(project.read_text().replace(CODE, OTHER))
    options = {"output-dir": str(tmp_path / "run")}
    config = to_mapping(recipe_config(repository / "recipes" / "demo.toml", (), options))
    grid = MemoryGrid({})
    with pytest.raises(ConfigError, match="what sent the run has") as refused:
        main(grid, Context(77, 5, {}, RecordDict(), config), sent_from(bundle))
    assert str(refused.value) in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert grid.sent == []
