"""The compiled loops give what NumPy's give, to the last bit, whatever the sizes and layouts."""

import itertools

import numpy as np
import pytest
import torch

from blackthorn.strategies.aggregation import aggregate, kernels


@pytest.mark.parametrize("size", range(1, 14))
def test_the_network_sorts_every_order_of_zeros_and_ones(size: int) -> None:
    """By the 0-1 principle it then sorts all there is."""
    columns = np.array(list(itertools.product((0.0, 1.0), repeat=size)), dtype=np.float32).T.copy()
    expected = np.sort(columns, axis=0)
    kernels.sort_columns(columns, kernels.sorting_network(size))
    np.testing.assert_array_equal(columns, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [31, 50, 64, 65, 200])
def test_the_network_sorts_columns_with_ties_and_extremes(size: int, dtype: type) -> None:
    generator = np.random.default_rng(size)
    columns: np.ndarray = generator.standard_normal((size, 37)).astype(dtype)
    columns[::3] = np.round(columns[::3])
    columns[0], columns[-1] = np.finfo(dtype).max, -np.finfo(dtype).max
    expected = np.sort(columns, axis=0)
    kernels.sort_columns(columns, kernels.sorting_network(size))
    np.testing.assert_array_equal(columns, expected)


@pytest.mark.parametrize("layout", ["rows", "columns", "every other"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_of_many_numbers_is_the_loop_over_rows_in_float64(
    dtype: torch.dtype, layout: str
) -> None:
    generator = np.random.default_rng(3)
    wide = torch.from_numpy(generator.standard_normal((9, 2 * 130_001))).to(dtype)
    values = {
        "rows": wide[:, :130_001].contiguous(),
        "columns": wide[:, :130_001].T.contiguous().T,
        "every other": wide[:, ::2][:, :130_001],
    }[layout]
    assert values.numel() > aggregate.SMALL
    weights = generator.random(9)
    weights[[1, 4]] = 0
    total = np.zeros(values.shape[1])
    for weight, row in zip(weights, values.numpy(), strict=True):
        total += weight * row.astype(np.float64)
    found = aggregate.weighted_sum(values, weights).numpy()
    np.testing.assert_array_equal(found, total.astype(found.dtype))


def test_sorted_columns_of_many_numbers_are_those_of_few() -> None:
    generator = np.random.default_rng(4)
    values = torch.from_numpy(generator.standard_normal((11, 120_000), dtype=np.float32))
    assert values.numel() > aggregate.SMALL
    rows = np.array([0, 2, 3, 7, 10])

    def second(columns: np.ndarray) -> np.ndarray:
        return columns[1]

    found = aggregate.over_sorted_columns(values, second, rows).numpy()
    np.testing.assert_array_equal(found, np.sort(values.numpy()[rows], axis=0)[1])
