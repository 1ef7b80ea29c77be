"""The papers' own data sets and models: a generated set in the same files goes all the way in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import write_cifar10, write_emnist, write_features
from rich.console import Console
from torch import nn
from torchvision.models import resnet18

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.tasks.datasets import DataUnavailable, load_dataset
from blackthorn.tasks.features import load_features
from blackthorn.tasks.models import build_model

# A few clients, steps and examples: all else is the recipe's.
SMALL: dict[str, dict[str, Any]] = {
    "fat-clipping-cifar10": {"num-clients": 5, "clients-per-round": 2, "local-steps": 2},
    "understanding-clipping-emnist": {"num-clients": 2, "examples-per-client": 8},
    "understanding-clipping-cifar10": {"num-clients": 2, "examples-per-client": 8},
    "dp-cifar10-features": {"num-clients": 12, "num-classes": 3, "claim-privacy": False},
}
_FEW = {"clients-per-round": 1, "local-steps": 1, "batch-size": 4}


@pytest.mark.parametrize("recipe", SMALL)
def test_a_recipe_runs_on_data_in_the_paper_s_files(
    recipe: str, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_emnist(tmp_path)
    write_cifar10(tmp_path, monkeypatch)
    write_features(tmp_path)
    values = {**SMALL[recipe], "num-server-rounds": 1, "report": False}
    values |= _FEW if recipe.startswith("understanding") else {}
    values |= {"data-dir": str(tmp_path), "output-dir": str(tmp_path / "run")}
    config = recipe_config(repository / "recipes" / f"{recipe}.toml", (), values)
    summary = simulate(config, Console(quiet=True))
    assert summary["rounds_completed"] == 1
    assert 0 <= summary["final"]["accuracy"] <= 1


def test_emnist_is_its_digits_as_they_are_in_the_files(tmp_path: Path) -> None:
    written = write_emnist(tmp_path)
    dataset = load_dataset("emnist", str(tmp_path))
    assert (dataset.input_shape, dataset.num_classes) == ((1, 28, 28), 10)
    for part, (images, labels) in zip((dataset.train, dataset.test), written.values(), strict=True):
        np.testing.assert_allclose(part.x[:, 0].numpy(), images / 255, rtol=1e-6)
        assert part.y.tolist() == labels.tolist()


def test_absent_emnist_says_how_to_get_its_digits(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match=r"EMNIST.*split=.*digits.*download=True"):
        load_dataset("emnist", str(tmp_path))


def test_features_are_read_as_float32_and_once(tmp_path: Path) -> None:
    written = write_features(tmp_path, dimension=7)
    dataset = load_features(str(tmp_path))
    assert (dataset.input_shape, dataset.num_classes) == ((7,), 3)
    for part, (x, y) in zip((dataset.train, dataset.test), written.values(), strict=True):
        assert part.x.dtype == torch.float32
        np.testing.assert_array_equal(part.x.numpy(), x.astype(np.float32))
        assert part.y.tolist() == y.tolist()
    assert load_features(str(tmp_path)) is dataset


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({}, "test.npz"),
        ({"x": np.zeros((3, 2))}, "it has no array y"),
        ({"x": np.zeros((3, 9)), "y": np.zeros(3, int)}, "train.npz has 7 features and 3 classes"),
        ({"x": np.zeros((3, 7)), "y": np.full(3, 3)}, "test.npz 7 and 4"),
        ({"x": np.zeros(3), "y": np.zeros(3, int)}, r"x \(3,\) and y \(3,\)"),
        ({"x": np.zeros((3, 7)), "y": np.zeros(2, int)}, r"y \(2,\)"),
        ({"x": np.zeros((3, 7)), "y": np.zeros(3)}, "y of float64"),
        ({"x": np.full((3, 7), np.nan), "y": np.zeros(3, int)}, "not finite"),
        ({"x": np.zeros((3, 7)), "y": np.full(3, -1)}, "labels < 0"),
        ({"x": np.array([[{}]]), "y": np.zeros(1, int)}, "allow_pickle"),
    ],
)
def test_features_that_are_none_are_told_in_one_line(
    test: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_features(tmp_path, dimension=7)
    path = tmp_path / "features" / "test.npz"
    path.unlink()
    if test:
        np.savez(path, **test)
    with pytest.raises(DataUnavailable, match=message) as error:
        load_features(str(tmp_path))
    assert "\n" not in str(error.value) and "data-dir" in str(error.value)


def test_features_need_their_form_said() -> None:
    with pytest.raises(ConfigError, match="task features needs a shape"):
        make_config({"task": "features"})


# The models.


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_models_have_the_papers_sizes() -> None:
    """Zhang et al., Tables 2 and 3: 3.3 and 11.1 million."""
    assert size(build_model("alexnet", (3, 32, 32), 10, 0)) / 1e6 == pytest.approx(3.3, abs=0.05)
    assert size(build_model("resnet-18", (3, 32, 32), 10, 0)) / 1e6 == pytest.approx(11.1, abs=0.1)


def test_resnet_18_has_torchvision_s_layers_but_for_its_first() -> None:
    """The same weights, shape by shape: its 7x7 convolution on 224 pixels is one of 3x3 here."""

    def group_norm(channels: int) -> nn.Module:
        return nn.GroupNorm(32, channels)

    theirs = resnet18(num_classes=10, norm_layer=group_norm)
    shapes = [tuple(p.shape) for name, p in theirs.named_parameters() if name != "conv1.weight"]
    ours = build_model("resnet-18", (3, 32, 32), 10, 0)
    own = [tuple(p.shape) for name, p in ours.named_parameters() if name != "conv.weight"]
    assert sorted(own) == sorted(shapes)


@pytest.mark.parametrize("name", ["alexnet", "resnet-18"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_the_models_take_both_data_sets_and_keep_no_statistics(
    name: str, shape: tuple[int, ...]
) -> None:
    module = build_model(name, shape, 10, 3)
    assert not list(module.buffers())
    x = torch.rand(2, *shape)
    logits = module(x)
    assert logits.shape == (2, 10) and logits.isfinite().all()
    # An example's logits hang on no other's.
    torch.testing.assert_close(module(x[:1]), logits[:1], rtol=1e-4, atol=1e-5)
    again = build_model(name, shape, 10, 3)
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["alexnet", "resnet-18"])
def test_what_is_no_image_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        build_model(name, (64,), 10, 0)
