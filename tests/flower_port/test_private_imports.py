"""What Flower does not promise is used in flower_port alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROMISED = ("flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")
PORT = "flower_port"


def private(text: str) -> Iterator[str]:
    """Modules of Flower's that a file imports, or names, and that are not for everybody."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As for importlib, or the path of a gRPC method.
            names = re.findall(r"^/?(flwr\.[\w.]+)", node.value)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            if name.startswith("flwr") and ".".join(name.split(".")[:2]) not in PROMISED:
                yield name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from flwr.app import Message", []),
        ("from flwr.serverapp.strategy import Result", []),
        ("import flwr.supercore.run", ["flwr.supercore.run"]),
        ("import flwr", []),
        ('importlib.import_module("flwr.superlink.cli")', ["flwr.superlink.cli"]),
        ('call("/flwr.proto.Fleet/PullMessages")', ["flwr.proto.Fleet"]),
        ('"""flwr, in words"""', []),
        ("def f():\n    from flwr.common.serde import message_from_proto", ["flwr.common.serde"]),
    ],
)
def test_a_private_import_is_found_wherever_it_stands(text: str, found: list[str]) -> None:
    assert list(private(text)) == found


def test_only_the_port_uses_what_flower_does_not_promise(repository: Path) -> None:
    links = [path for path in (repository / "blackthorn").iterdir() if path.is_dir()]
    packages = {path.name for path in links if (path / "__init__.py").is_file()}
    assert {PORT, "attacks", "launch", "strategies"} <= packages
    for folder in {*packages, "benchmarks", "docker", "docs"} - {PORT}:
        for path in sorted((repository / folder).rglob("*.py")):
            assert list(private(path.read_text(encoding="utf-8"))) == [], path
