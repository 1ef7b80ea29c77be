"""docs/architecture.md names what is there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from blackthorn.settings.catalogue import ALGORITHMS, LOCAL_RULES, load
from blackthorn.strategies import FederatedStrategy, LocalRule

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# `FILE.py: NAME`, and names alone after "FILE.py: its row in".
PLACES = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:[\w-]+/)*[\w.-]+\.(?:py|md|toml)|(?:[\w-]+/)+)(?::|`)", PAGE)))
# What a run leaves, and what is made when it is needed.
OF_RUNS = {"config.toml", "checkpoints/", "posterior/", "state/"}


def names_in(path: Path) -> set[str]:
    """Functions, classes with their methods, and constants at the top of a module."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_the_page_names_many_places() -> None:
    assert len(PLACES) > 40
    assert len(FILES) > 60


@pytest.mark.parametrize("name", [name for name in FILES if name not in OF_RUNS])
def test_a_file_that_the_page_names_exists(name: str) -> None:
    path = ROOT / name
    assert path.is_dir() if name.endswith("/") else path.is_file()


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_a_function_that_the_page_names_is_in_its_file(file: str, name: str) -> None:
    assert name in names_in(ROOT / file)


# (file, what the page says is in it without naming the file beside it)
TABLES = (
    ("strategies/aggregation/__init__.py", "RULES"),
    ("settings/catalogue.py", "GUARANTEES"),
    ("settings/catalogue.py", "Facts"),
    ("settings/catalogue.py", "LOCAL_RULES"),
    ("settings/catalogue.py", "TASKS"),
    ("tasks/problem.py", "_LOADERS"),
    ("attacks/misbehaviour.py", "REPLY_ATTACKS"),
    ("attacks/registry.py", "_VECTORS"),
    ("attacks/registry.py", "_SHARED_RANDOMNESS"),
    ("attacks/registry.py", "_ABSENCES"),
    ("settings/declaration.py", "SERVER"),
    ("settings/declaration.py", "FREE"),
    ("settings/declaration.py", "OF_A_CHAIN"),
    ("settings/declaration.py", "PLACE"),
)


@pytest.mark.parametrize(("file", "name"), TABLES)
def test_a_table_that_takes_a_row_is_where_the_page_says(file: str, name: str) -> None:
    (paragraph,) = [part for part in re.split(r"\n(?=\d\. )|\n\n", PAGE) if f"`{name}`" in part]
    assert f"`{file}`" in paragraph
    assert name in names_in(ROOT / file)


def test_every_table_is_checked() -> None:
    tables = set(re.findall(r"`(_?[A-Z][A-Z_]{3,})`", PAGE))
    assert tables == {name for _, name in TABLES if name.isupper()}


def test_the_rooms_are_those_of_the_linter() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    block = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    rooms = [re.split(r" {2,}", line)[0] for line in block[1].splitlines()]
    assert rooms == layers


# "| `name`, `name` | file ... |": the systems, and the files that the page says are enough.
SYSTEMS = {
    name: set(re.findall(r"`(strategies/[\w/]+\.py)", line))
    for line in PAGE.splitlines()
    if (row := re.match(r"\| ((?:`[a-z-]+`(?:, )?)+) \|", line)) and "`strategies/" in line
    for name in re.findall(r"`([a-z-]+)`", row[1])
}


def files_of(kind: type, base: type) -> set[str]:
    """Where a class is written, and the classes that it stands on below `base`."""
    own = [one for one in kind.__mro__ if issubclass(one, base) and one is not base]
    return {one.__module__.removeprefix("blackthorn.").replace(".", "/") + ".py" for one in own}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "model-clipping"])
def test_a_system_is_in_at_most_three_files(name: str) -> None:
    facts = ALGORITHMS[name]
    # With noise ce-fedavg is dp-fedavg.
    noised = facts.noised if facts.noised == facts.where else None
    classes = [load(where) for where in (facts.where, noised) if where]
    assert len(SYSTEMS[name]) <= 3
    for kind in classes:
        assert files_of(kind, FederatedStrategy) <= SYSTEMS[name]


@pytest.mark.parametrize("rule", [name for name in LOCAL_RULES if name != LocalRule.name])
def test_a_clients_half_is_in_a_file_of_its_system(rule: str) -> None:
    assert files_of(load(LOCAL_RULES[rule]), LocalRule) <= set().union(*SYSTEMS.values())
