"""Tasks: what each name stands for, and one line for what it cannot be."""

import pytest
import torch

from blackthorn.tasks.datasets import DataUnavailable
from blackthorn.tasks.labelled import TASK_NAMES, default_model, load_task
from blackthorn.tasks.models import build_model


def test_digits_are_ten_classes_of_8_by_8_with_cross_entropy() -> None:
    task = load_task("digits")
    assert task.train is not None
    assert task.test is not None
    assert len(task.train) + len(task.test) == 1797
    assert (task.input_shape, task.num_classes) == ((1, 8, 8), 10)
    outputs = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    losses = task.example_loss(outputs, torch.tensor([0, 1]))
    e = torch.e
    expected = torch.tensor([(e**2 + 2) / e**2, e + 2], dtype=torch.float64).log()
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize(
    ("text", "shape"), [("1,28,28", (1, 28, 28)), (" 3, 4 ", (3, 4)), ("64", (64,))]
)
def test_own_data_have_the_shape_and_classes_they_are_told(
    text: str, shape: tuple[int, ...]
) -> None:
    task = load_task("own-data", input_shape=text, num_classes=7)
    assert (task.train, task.test) == (None, None)
    assert (task.input_shape, task.num_classes) == (shape, 7)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "-1,2", "1.5", "(1,2)", "٣"])
def test_an_input_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"input-shape is .* positive integers such as"):
        load_task("own-data", input_shape=text, num_classes=2)


def test_what_a_task_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="task 'digit' is unknown: allowed are digits, mnist"):
        load_task("digit")
    with pytest.raises(ValueError, match="num-classes is 0: task 'own-data' needs at least 2"):
        load_task("own-data", input_shape="3")
    with pytest.raises(ValueError, match="input-shape is '64': task 'digits' has '1,8,8'"):
        load_task("digits", input_shape="64")
    with pytest.raises(ValueError, match="num-classes is 9: task 'digits' has 10"):
        load_task("digits", num_classes=9)
    with pytest.raises(DataUnavailable):
        load_task("mnist", "/nowhere")
    assert load_task("digits", input_shape="1,8,8", num_classes=10).name == "digits"


SHAPES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "emnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "features": (512,),
    "own-data": (5,),
}


@pytest.mark.parametrize("name", TASK_NAMES)
def test_the_default_model_fits_the_task(name: str) -> None:
    module = build_model(default_model(name), SHAPES[name], 10, 0)
    assert module(torch.rand(2, *SHAPES[name])).shape == (2, 10)


def test_an_unknown_task_has_no_default_model() -> None:
    with pytest.raises(ValueError, match="task 'x' is unknown"):
        default_model("x")
