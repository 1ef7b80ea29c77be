"""Models of one's own, as they come: BatchNorm, a frozen layer, a tied one, a scalar."""

from pathlib import Path
from typing import Any

import pytest
import torch
from digits_runs import PRIVATE, configuration, run
from safetensors.torch import load_file

from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError
from blackthorn.tasks.models import build_model

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, classes)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.norm.running_mean.fill_(0.25)

    def forward(self, x):
        x = torch.relu(self.norm(self.body(x.flatten(1))))
        x = self.second(torch.relu(self.first(x))) + self.frozen(x)
        return self.logit_scale * self.head(x)

def build(input_shape, num_classes):
    return Net(num_classes)

def without_norm(input_shape, num_classes):
    net = Net(num_classes)
    net.norm = nn.Identity()
    return net
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return f"{path}:build"


def options(own: str, **more: Any) -> dict[str, Any]:
    return {"model": own, "num-server-rounds": 2, **more}


@pytest.mark.parametrize("batching", ["loop", "vmap"])
def test_it_trains_and_leaves_alone_what_nobody_trains(
    own: str, tmp_path: Path, batching: str
) -> None:
    path = Path(own.partition(":")[0])
    path.write_text(
        MODEL.replace(
            "class Net(nn.Module):", f"class Net(nn.Module):\n    batching = '{batching}'\n"
        )
    )
    entries = run(tmp_path / "run", **options(own))
    assert entries[-1]["round"] == 2
    final = load_file(tmp_path / "run" / "checkpoints" / "final.safetensors")
    first = build_model(own, (1, 8, 8), 10, configuration(tmp_path / "other").seed).state_dict()
    assert final.keys() >= first.keys() - {"second.weight"}
    for name in first:
        if name in final:
            stays = name.startswith(("frozen", "norm.running", "norm.num"))
            assert torch.equal(final[name], first[name]) == stays, name
    assert final["logit_scale"].shape == ()


def test_a_look_at_its_shapes_changes_no_statistic(own: str) -> None:
    module = build_model(own, (1, 8, 8), 10, 0)
    assert module.training
    state = module.state_dict()
    assert torch.equal(state["norm.running_mean"], torch.full((16,), 0.25))
    assert int(state["norm.num_batches_tracked"]) == 0


def test_its_statistics_are_not_averaged_under_a_claim(own: str, tmp_path: Path) -> None:
    private = {**PRIVATE, "algorithm": "dp-fedavg"}
    with pytest.raises(ConfigError, match="statistics = average breaks the claim: the model's"):
        prepare(configuration(tmp_path / "run", **options(own, **private)))
    prepare(configuration(tmp_path / "run", **options(own, **private, statistics="server")))
    without = own.replace(":build", ":without_norm")
    prepare(configuration(tmp_path / "run", **options(without, **private)))


COUNTING = """
from pathlib import Path

import torch
from torch import nn

class Counting(nn.Module):
    batching = "loop"

    def __init__(self, classes):
        super().__init__()
        self.head, self.calls = nn.Linear(64, classes), 0

    def forward(self, x):
        self.calls += 1
        if torch.is_grad_enabled():
            with Path("calls").open("a") as calls:
                calls.write(f"{self.calls} ")
        return self.head(x.flatten(1))

def build(input_shape, num_classes):
    return Counting(num_classes)
"""


def test_training_remembers_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a claim a client trains a copy of the module as it was loaded, as on a node."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(COUNTING)
    private = {**PRIVATE, "algorithm": "dp-fedavg", "local-steps": 1}
    run(tmp_path / "run", **options("net.py:build", **private, **{"num-server-rounds": 3}))
    # The first is the look at its shapes, where it is loaded.
    loaded, *trained = (tmp_path / "calls").read_text().split()
    assert loaded == "1"
    assert len(trained) >= 3
    assert set(trained) == {"2"}
