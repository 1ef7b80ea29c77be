"""The first model out of a file of weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from blackthorn.tasks.initial_model import load_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


def state() -> dict[str, torch.Tensor]:
    module = Tied()
    module.get_buffer("norm.running_mean").fill_(2.0)
    return module.state_dict()


@pytest.mark.parametrize("kind", ["safetensors", "pt", "pth"])
def test_weights_and_statistics_are_the_file_s(kind: str, tmp_path: Path) -> None:
    path, wanted = tmp_path / f"weights.{kind}", state()
    if kind == "safetensors":
        # Which takes a tied tensor once.
        save_file({n: v for n, v in wanted.items() if n != "second.weight"}, path)
    else:
        torch.save(wanted if kind == "pt" else {"state_dict": wanted, "epoch": 3}, path)
    module = Tied()
    load_weights(module, str(path))
    assert all(torch.equal(module.state_dict()[name], wanted[name]) for name in wanted)
    assert module.second.weight is module.first.weight


def test_a_client_reads_it_for_frozen_parameters_alone(tmp_path: Path) -> None:
    load_weights(Tied(), str(tmp_path / "nowhere.pt"), frozen_alone=True)
    module = Tied()
    module.first.requires_grad_(False)
    with pytest.raises(ValueError, match="there is no such file"):
        load_weights(module, str(tmp_path / "nowhere.pt"), frozen_alone=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": Runs()}, "it holds more than weights, and would run code"),
        ({"epoch": 3}, "it holds no state_dict of tensors"),
        ({**state(), "head.bias": torch.ones(2)}, "the model has no 'head.bias'"),
        ({"first.weight": torch.ones(3, 3)}, "it lacks the model's 'norm.weight'"),
        ({**state(), "norm.bias": torch.ones(4)}, r"'norm.bias' has shape \(4,\), of the model"),
        (
            {**state(), "norm.bias": torch.tensor([0.0, float("nan"), 0.0])},
            "'norm.bias' has values that are not finite",
        ),
    ],
)
def test_another_file_is_refused_in_one_line(
    content: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match=said) as refused:
        load_weights(Tied(), str(path))
    assert "\n" not in str(refused.value) and capsys.readouterr().out == ""


@pytest.mark.filterwarnings("error")
def test_a_file_of_another_pickle_is_refused_without_a_warning(tmp_path: Path) -> None:
    torch.save({"model": Runs()}, tmp_path / "weights.pt", pickle_protocol=4)
    with pytest.raises(ValueError, match="would run code"):
        load_weights(Tied(), str(tmp_path / "weights.pt"))


def test_a_torn_file_and_another_kind_are_refused(tmp_path: Path) -> None:
    for name in ("torn.pt", "torn.safetensors"):
        (tmp_path / name).write_bytes(b"torn")
        with pytest.raises(ValueError, match="is not allowed: it "):
            load_weights(Tied(), str(tmp_path / name))
    with pytest.raises(ValueError, match=r"allowed are \.safetensors, \.pt, \.pth files"):
        load_weights(Tied(), "weights.npz")
