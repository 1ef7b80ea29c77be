"""A state_dict as one vector and back: order, dtypes, and what is not part of w."""

import numpy as np
import pytest
import torch
from torch import nn

from blackthorn.strategies.global_model import ModelLayout

STATE: dict[str, np.ndarray] = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "norm.running_mean": np.array([7.0, 8.0], dtype=np.float32),
    "norm.running_var": np.array([9.0, 10.0], dtype=np.float32),
    "norm.num_batches_tracked": np.array(11, dtype=np.int64),
    "a.scale": np.array(12.0, dtype=np.float32),
    "empty": np.zeros((0, 4), dtype=np.float32),
    "a.bias": np.array([13.0, 14.0], dtype=np.float32),
}
VECTOR = [0, 1, 2, 3, 4, 5, 12, 13, 14]


def test_the_vector_holds_the_parameters_in_the_state_s_order() -> None:
    layout = ModelLayout.of(STATE)
    assert layout.trainable == ("b.weight", "a.scale", "empty", "a.bias")
    assert layout.dimension == 9
    vector = layout.flatten(STATE)
    assert vector.dtype == torch.float32
    assert vector.tolist() == VECTOR


def test_flatten_follows_the_layout_and_not_the_state_given() -> None:
    shuffled = dict(reversed(STATE.items()))
    assert ModelLayout.of(STATE).flatten(shuffled).tolist() == VECTOR


def test_a_flattened_state_shares_no_memory_with_it() -> None:
    state = {"w": np.zeros(3, dtype=np.float32)}
    ModelLayout.of(state).flatten(state).fill_(5)
    assert state["w"].tolist() == [0, 0, 0]


def test_unflatten_takes_parameters_from_the_vector_and_buffers_from_the_server() -> None:
    layout = ModelLayout.of(STATE)
    buffers = {name: STATE[name] + 100 for name in STATE if name.startswith("norm")}
    state = layout.unflatten(torch.tensor(VECTOR, dtype=torch.float32) * 2, buffers)
    assert list(state) == list(STATE)
    for name, value in state.items():
        expected = STATE[name] + 100 if name.startswith("norm") else STATE[name] * 2
        np.testing.assert_array_equal(value, expected)
        assert value.shape == STATE[name].shape
        assert value.dtype == STATE[name].dtype


def test_unflatten_shares_no_memory_with_the_vector() -> None:
    layout = ModelLayout.of({"w": np.zeros(3, dtype=np.float32)})
    vector = torch.ones(3)
    state = layout.unflatten(vector, {})
    state["w"][:] = 9
    assert vector.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float32", "float64"), torch.float64),
        (("float16", "float32"), torch.float32),
        (("float16", "float16"), torch.float32),
    ],
)
def test_the_vector_is_as_wide_as_the_widest_parameter(
    dtypes: tuple[str, str], expected: torch.dtype
) -> None:
    value = 1 + 2**-10
    state: dict[str, np.ndarray] = {name: np.array([value], dtype=name) for name in set(dtypes)}
    layout = ModelLayout.of(state)
    vector = layout.flatten(state)
    assert vector.dtype == layout.dtype == expected
    back = layout.unflatten(vector, {})
    assert {name: entry.dtype for name, entry in back.items()} == {
        name: np.dtype(name) for name in state
    }
    assert all(entry[0] == value for entry in back.values())


def test_a_float64_buffer_does_not_widen_the_vector() -> None:
    state: dict[str, np.ndarray] = {
        "w": np.zeros(2, dtype=np.float32),
        "norm.running_var": np.ones(2),
    }
    assert ModelLayout.of(state).dtype == torch.float32


@pytest.mark.parametrize(
    "state",
    [{}, {"counts": np.arange(3)}, {"norm.running_mean": np.zeros(2)}, {"flags": np.array([True])}],
)
def test_a_model_without_parameters_is_refused(state: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="no floating-point parameter"):
        ModelLayout.of(state)


def test_a_torch_model_with_batch_norm() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    layout = ModelLayout.of(state)
    assert layout.trainable == tuple(name for name, _ in module.named_parameters())
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(layout.flatten(state), expected, rtol=0, atol=0)
