"""What is imported, and installed, before anybody needs it: little."""

import json
import re
import subprocess
import sys
from importlib.metadata import distribution

import pytest

from blackthorn.installation import NotInstalled, needing, require

# Libraries of which each takes long to import.
SLOW = {
    *("arviz", "dp_accounting", "jinja2", "matplotlib", "mlflow", "numba", "opacus", "pandas"),
    *("PIL", "ray", "safetensors", "scipy", "sklearn", "sqlalchemy", "tensorboard", "torchvision"),
}


def imported(statement: str, beyond: str = "") -> set[str]:
    """Modules that a new interpreter has after `statement` and had not after `beyond`."""
    code = f"import json, sys\n{beyond}\nbefore = set(sys.modules)\n{statement}\n"
    code += "print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_the_strategies_bring_little_beyond_torch_and_flower() -> None:
    """0.3 s at most: without SciPy it is half of that, of which Pydantic has most."""
    modules = imported("import blackthorn.strategies", beyond="import torch, flwr")
    assert "blackthorn.strategies.base" in modules
    assert tops(modules) & SLOW == set()
    assert len(modules) < 250


def test_the_command_s_help_computes_nothing() -> None:
    """0.4 s at most."""
    ask = "from blackthorn.__main__ import main\nsys.argv = ['blackthorn', '--help']\n"
    modules = imported(f"{ask}try: main()\nexcept SystemExit: pass")
    assert "blackthorn.launch.cli" in modules
    assert tops(modules) & {*SLOW, "flwr", "numpy", "torch"} == set()
    assert len(modules) < 480


def test_an_extra_that_is_installed_is_enough() -> None:
    require("app", "this")


def test_what_is_missing_of_an_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"torchvision", "matplotlib"}
    found = distribution

    def without(name: str) -> object:
        return found("no-such-distribution" if name in absent else name)

    monkeypatch.setattr("blackthorn.installation.distribution", without)
    line = 'a run needs matplotlib, torchvision, not installed here: pip install "blackthorn[app]"'
    with pytest.raises(NotInstalled, match=re.escape(line)):
        require("app", "a run")


def test_an_import_that_an_extra_would_bring_is_one_line() -> None:
    line = 'task = x needs no_such_module, not installed here: pip install "blackthorn[app]"'
    with pytest.raises(NotInstalled, match=re.escape(line)), needing("app", "task = x"):
        import no_such_module  # noqa: F401
