"""docs/randomness.md lists every place that makes random numbers, and what feeds it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blackthorn.client_app import dp_sgd, private_update
from blackthorn.installation import APP_ROOT
from blackthorn.launch.federation.process_environment import write_secret
from blackthorn.randomness import Stream
from blackthorn.server_app.build import build_strategy
from blackthorn.settings.config import make_config
from blackthorn.strategies.noise import SeededRandomness, SystemRandomness
from blackthorn.strategies.private_averaging import PrivateAveraging

PACKAGES = (
    *("benchmarks", "docker"),
    *sorted(path.name for path in APP_ROOT.iterdir() if path.is_dir()),
)
# What starts with one of these makes random numbers or something that does.
MODULES = ("numpy.random.", "random.", "secrets.", "uuid.", "torch.random.", "torch.nn.init.")
CALLS = (
    *("os.urandom", "os.getrandom", "hash", "ssl.RAND_bytes"),
    *("torch.Generator", "torch.manual_seed", "torch.seed", "torch.normal", "torch.multinomial"),
    *("torch.bernoulli", "torch.poisson"),
)
METHODS = (
    *("normal_", "uniform_", "random_", "bernoulli_", "cauchy_", "exponential_", "geometric_"),
    *("log_normal_", "generate_private_key", "random_serial_number", "manual_seed"),
)
# Our own sources, whatever they are imported as.
OWN = (
    *("SystemRandomness", "SeededRandomness", "generator_of"),
    *("partition_generator", "bayes_linear_generator"),
)
# What claims and secrets hang on; what is not here must say that nothing does.
PROTECTED = {
    "strategies/noise.py: _words",
    "strategies/private_averaging.py: PrivateAveraging._randomness",
    "client_app/private_update.py: _randomness",
    "client_app/dp_sgd.py: _randomness",
    "secure_aggregation/key_agreement.py: system_bytes",
    "secure_aggregation/masks.py: system_stream",
    "launch/federation/process_environment.py: write_secret",
    "launch/federation/certificates.py: make_authority",
    "launch/federation/certificates.py: _server_pair",
    "launch/federation/certificates.py: make_client_key",
}
# What may feed a claim or a secret: 128 bits or more of the operating system's entropy.
STRONG = ("SystemRandomness", "urandom", "token_bytes", "generate_private_key")


def generators(root: Path) -> dict[str, set[str]]:
    """`path: function` -> the calls in it that make random numbers, by their full names."""
    found: dict[str, set[str]] = {}
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    for path in (*sorted((root / "blackthorn").glob("*.py")), *files):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        aliases = dict(_aliases(tree))
        for function, call in _calls(tree):
            name = _full_name(call.func, aliases)
            if _is_random(name):
                found.setdefault(f"{path.relative_to(root)}: {function}", set()).add(name)
    return found


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a name of the file stands for: np -> numpy, uuid4 -> uuid.uuid4."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (
                    (name.asname or name.name.partition(".")[0]),
                    (name.name if name.asname else name.name.partition(".")[0]),
                )
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield name.asname or name.name, f"{node.module or ''}.{name.name}".lstrip(".")


def _calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield function or "module", node
        inner = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{node.name}" if function else node.name
        yield from _calls(node, inner)


def _full_name(function: ast.expr, aliases: dict[str, str]) -> str:
    parts = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    first = aliases.get(function.id, function.id) if isinstance(function, ast.Name) else "?"
    return ".".join([first, *reversed(parts)])


def _is_random(name: str) -> bool:
    last = name.rpartition(".")[2]
    return (
        name.startswith((*MODULES, "torch.rand")) or name in CALLS or last in OWN or last in METHODS
    )


@pytest.fixture(scope="module")
def found(repository: Path) -> dict[str, set[str]]:
    return generators(repository)


@pytest.fixture(scope="module")
def table(repository: Path) -> dict[str, tuple[str, str]]:
    """`path: function` -> what feeds it, and what hangs on it."""
    rows = {}
    for line in (repository / "docs" / "randomness.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3:
            for place in re.findall(r"`([^`]+\.py: [^`]+)`", cells[0]):
                assert place not in rows, f"{place} has two rows"
                rows[place] = (cells[1], cells[2])
    return rows


def test_the_list_of_random_numbers_is_complete(
    found: dict[str, set[str]], table: dict[str, tuple[str, str]]
) -> None:
    new = {place: calls for place, calls in found.items() if place not in table}
    assert not new, "random numbers are made here, and docs/randomness.md does not say so"
    assert not set(table) - set(found), "docs/randomness.md lists what is no longer there"


def test_what_is_protected_is_fed_by_the_operating_system(
    found: dict[str, set[str]], table: dict[str, tuple[str, str]]
) -> None:
    protected = {place for place, (_, on_it) in table.items() if not on_it.startswith("nothing")}
    assert protected == PROTECTED
    for place in protected:
        fed, on_it = table[place]
        assert fed.startswith("system"), place
        assert on_it.startswith(("claim: ", "secret: ")), place
        weak = {call.rpartition(".")[2] for call in found[place]} - {*STRONG}
        # A seed may be there in place of the system, where it drops the claim: tested below.
        assert weak <= ({"SeededRandomness"} if "insecure-seeded-noise" in fed else set()), place
    drawn = {p for p, calls in found.items() if any("SystemRandomness" in c for c in calls)}
    assert drawn <= protected


DP_SGD = {"local-dp-sgd": True, "dp-sgd-sample-rate": 0.1}
CENTRAL = {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 2.0}


def sources(values: dict[str, Any]) -> list[object]:
    """What feeds the claims of a run with these keys."""
    config = make_config(values)
    found: list[object] = []
    if config.local_dp_sgd:
        found.append(dp_sgd._randomness(config, (config.seed, 1, 0)))
    if config.noise_location == "client":
        found.append(private_update._randomness(config, 1, 0))
    if config.algorithm == "dp-fedavg":
        strategy = build_strategy(config)
        assert isinstance(strategy, PrivateAveraging)
        found.append(strategy._randomness(1, Stream.SERVER_NOISE))
    return found


@pytest.mark.parametrize(
    "values",
    [
        {**DP_SGD},
        {**CENTRAL},
        {**CENTRAL, "noise-location": "client"},
        {**CENTRAL, **DP_SGD, "noise-location": "client"},
        {**CENTRAL, **DP_SGD, "claim-privacy": False},
    ],
)
def test_a_claim_never_draws_from_a_seed(values: dict[str, Any]) -> None:
    drawn = sources({**values, "seed": 5})
    assert drawn
    assert all(isinstance(source, SystemRandomness) for source in drawn)
    seeded = sources({**values, "insecure-seeded-noise": True})
    assert all(isinstance(source, SeededRandomness) for source in seeded)


def test_secrets_are_long_enough(tmp_path: Path) -> None:
    assert len(write_secret(tmp_path / "secret").read_bytes()) >= 16


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ng = torch.Generator().manual_seed(1)",
        "from torch import Generator\ng = Generator()",
        "import numpy as np\nr = np.random.default_rng()",
        "from numpy.random import Philox as P\nr = P()",
        "from numpy import random\nr = random.PCG64(3)",
        "import random as r\nx = r.random()",
        "from secrets import randbits\nx = randbits(64)",
        "from uuid import uuid4\nx = uuid4()",
        "import os\nx = os.urandom(4)",
        "from os import urandom\nx = urandom(4)",
        "import torch\nx = torch.randn(3)",
        "from torch import randn\nx = randn(3)",
        "def f(w):\n    w.normal_()",
        "from blackthorn.strategies.noise import SystemRandomness\nx = SystemRandomness()",
        "from .noise import SeededRandomness\nx = SeededRandomness(1)",
    ],
)
def test_nothing_that_makes_random_numbers_is_overlooked(tmp_path: Path, source: str) -> None:
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "new.py").write_text(source)
    assert generators(tmp_path)
