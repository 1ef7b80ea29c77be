"""The project of docs/own-project.md, as it stands there, under every strategy of its table."""

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from markdown_blocks import blocks_of
from memory_grid import MemoryGrid, runs

from blackthorn.strategies import (
    BiClip,
    CEFedAvg,
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FatClippingPI,
    FatClippingPR,
    FederatedStrategy,
    FedLangevin,
    FullParticipation,
    GFedAvg,
    Langevin,
    ModelClipping,
    PrivacyPlan,
    Rage,
    RoundReport,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-project.md"
TASK, CLIENT, SERVER, *_LINES = (block.text for block in blocks_of(PAGE, "own-project.md"))
# The lines that go into `fit`.
WRAPPED, OWN = (f"    {line}" for line in _LINES)
CLIENTS, ROUNDS, STEPS = 4, 5, 8
_ADAM = "    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = types.ModuleType("task")
    monkeypatch.setitem(sys.modules, "task", module)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        exec(TASK, module.__dict__)
        yield module


def grid_of(line: str = _ADAM) -> MemoryGrid:
    """Clients whose optimizer is made by another line of the page."""
    assert _ADAM in CLIENT
    code = CLIENT.replace(_ADAM, line)
    if line != _ADAM:
        code = f"from blackthorn.client_app import Round\n{code}"
    module: dict[str, Any] = {}
    exec(code, module)
    return MemoryGrid({10 + i: runs(module["app"], **{"partition-id": i}) for i in range(CLIENTS)})


def accuracy(task: Any, state: dict[str, torch.Tensor]) -> float:
    """Of the examples of a client that does not take part."""
    x, y = task.load_data(1000)
    model = task.Net()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).float().mean())


def fedavg(task: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Flower's FedAvg, written out: the mean of all floating entries."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(ROUNDS):
        trained = []
        for client in range(CLIENTS):
            net = task.Net()
            net.load_state_dict(state)
            x, y = task.load_data(client)
            task.train(net, torch.optim.Adam(net.parameters(), lr=0.01), x, y, STEPS)
            trained.append(net.state_dict())
        for name, value in state.items():
            if value.is_floating_point():
                state[name] = torch.stack([one[name] for one in trained]).mean(dim=0)
    return state


OPTIONS: dict[str, Any] = {"num_clients": CLIENTS, "local_rate": 0.1}


def private(kind: Any, location: str) -> FederatedStrategy:
    plan = PrivacyPlan(
        ClipNorm(0.1, "parameter"),
        noise_multiplier=1.0,
        num_clients=CLIENTS,
        rounds=ROUNDS,
        participation=FullParticipation(),
        noise_location=location,  # type: ignore[arg-type]
    )
    return kind(plan, local_rate=0.1, statistics="local")


PLAIN: dict[str, tuple[Any, str]] = {
    "gfedavg": (lambda: GFedAvg(**OPTIONS), _ADAM),
    "rage": (lambda: Rage(0, identity="query", **OPTIONS), _ADAM),
    "fat-clipping-pr": (lambda: FatClippingPR(1e6, **OPTIONS), _ADAM),
    "ce-fedavg": (lambda: CEFedAvg(1e6, **OPTIONS), _ADAM),
    "model-clipping": (lambda: ModelClipping(1e6, **OPTIONS), _ADAM),
    "fat-clipping-pi": (lambda: FatClippingPI(1e6, STEPS, **OPTIONS), WRAPPED),
    "biclip": (lambda: BiClip(STEPS, high=1e6, **OPTIONS), WRAPPED),
}


@pytest.mark.parametrize("name", PLAIN)
def test_where_no_bound_bites_it_is_fedavg_s_model(name: str, task: Any) -> None:
    make, line = PLAIN[name]
    model = task.Net()
    expected = fedavg(task, model)
    assert accuracy(task, expected) > 0.9
    final = make().start(grid_of(line), model, num_rounds=ROUNDS, timeout=60).arrays
    state = final.to_torch_state_dict()
    for key, value in expected.items():
        if value.is_floating_point():
            np.testing.assert_allclose(state[key], value, rtol=1e-3, atol=1e-4)
    assert accuracy(task, state) == pytest.approx(accuracy(task, expected), abs=0.01)


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
@pytest.mark.parametrize("location", ["server", "client"])
def test_private_strategies_take_the_mod_alone(kind: Any, location: str, task: Any) -> None:
    strategy, reports = private(kind, location), list[RoundReport]()
    strategy._observers.append(reports.append)
    strategy.start(grid_of(), task.Net(), num_rounds=ROUNDS, timeout=60)
    assert [len(report.accepted) for report in reports] == [CLIENTS] * ROUNDS
    assert all(not report.over_bound for report in reports)


def test_langevin_s_steps_are_the_round_s_optimizer_s(task: Any) -> None:
    strategy = FedLangevin(1e-4, langevin=Langevin(0.01), num_clients=CLIENTS, statistics="average")
    reports: list[RoundReport] = []
    strategy._observers.append(reports.append)
    result = strategy.start(grid_of(OWN), task.Net(), num_rounds=ROUNDS, timeout=60)
    assert [report.accepted for report in reports] == [[0, 1, 2, 3]] * ROUNDS
    assert accuracy(task, result.arrays.to_torch_state_dict()) > 0.9


SIMULATION = """
import sys
sys.path.insert(0, sys.argv[1])
import task
from client_file import app as client_app
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from blackthorn.strategies import FatClippingPI

app = ServerApp()

@app.main()
def main(grid, context):
    reports = []
    strategy = FatClippingPI(
        1e6, 8, identity="query", local_rate=0.1, num_clients=2, observers=[reports.append]
    )
    strategy.start(grid, task.Net(), num_rounds=2, timeout=120)
    told = [(report.accepted, round(report.metrics["accuracy"])) for report in reports]
    print("done:", told)

run_simulation(app, client_app, 2, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.mark.deployment
def test_it_takes_part_in_flower_s_own_simulation(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    wrapped = CLIENT.replace(_ADAM, WRAPPED)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "client_file.py").write_text(f"from blackthorn.client_app import Round\n{wrapped}")
    environment = {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(tmp_path),
    }
    command = [sys.executable, "-c", SIMULATION, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert "done: [([0, 1], 1), ([0, 1], 1)]" in done.stdout, done.stderr[-3000:]


def test_the_server_s_file_runs(task: Any) -> None:
    module: dict[str, Any] = {}
    exec(SERVER, module)
    grid = grid_of()
    module["app"](grid, Context(1, 0, {}, RecordDict(), {}))
    trained = [m for m in grid.sent if m.metadata.message_type == "train" and "rule" in m.content]
    assert len(trained) == 5 * CLIENTS
    assert isinstance(trained[0].content["arrays"], ArrayRecord)
    del task
