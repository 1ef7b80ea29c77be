"""Records and their entries are named once, in blackthorn/wire.py."""

import ast
from pathlib import Path

from blackthorn import wire

NAMES = {name: value for name, value in vars(wire).items() if name.isupper()}
# The same words for something else: a run's key and a node's, and how replies are weighed.
OTHERWISE = {
    ("client_app/node_data.py", "client-id"),
    ("client_app/node_data.py", "poison"),
    ("client_app/dp_sgd.py", "local-lr"),
    ("client_app/taking_part.py", "num-examples"),
    ("strategies/base.py", "num-examples"),
    ("strategies/options.py", "num-examples"),
    ("strategies/private_averaging.py", "num-examples"),
}


def test_no_two_names_are_one_entry() -> None:
    assert len(set(NAMES.values())) == len(NAMES)


def test_every_name_is_used_and_nobody_writes_what_it_stands_for(repository: Path) -> None:
    used: set[str] = set()
    written: set[tuple[str, str]] = set()
    telling = {value for value in NAMES.values() if "-" in value or value in ("poison", "attested")}
    for package in ("attacks", "client_app", "server_app", "simulation", "strategies"):
        for path in (repository / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Name):
                    used.add(node.id)
                if isinstance(node, ast.Constant) and node.value in telling:
                    written.add((str(path.relative_to(repository)), str(node.value)))
    assert NAMES.keys() <= used
    assert written <= OTHERWISE
