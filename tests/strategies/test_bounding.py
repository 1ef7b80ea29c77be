"""clip and normalize against closed forms and sums by math.fsum."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from blackthorn.strategies import (
    CEFedAvg,
    ClipNorm,
    FatClippingPI,
    FatClippingPR,
    ModelClipping,
    PrivacyPlan,
)
from blackthorn.strategies.bounding import clip, normalize, row_norms

INF = float("inf")
Bounding = Callable[[torch.Tensor, float], torch.Tensor]
DTYPES = [torch.float32, torch.float64]


def exact_norm(row: Iterable[float]) -> float:
    return math.sqrt(math.fsum(float(x) ** 2 for x in row))


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipped_and_normalised_rows_are_those_by_hand(dtype: torch.dtype) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0], [-6.0, 8.0]], dtype=dtype)
    expected_clip = torch.tensor([[1.2, 1.6], [0.6, 0.8], [0.0, 0.0], [-1.2, 1.6]], dtype=dtype)
    expected_norm = torch.tensor([[1.2, 1.6], [1.2, 1.6], [0.0, 0.0], [-1.2, 1.6]], dtype=dtype)
    torch.testing.assert_close(clip(rows, 2.0), expected_clip, rtol=1e-6, atol=0)
    torch.testing.assert_close(normalize(rows, 2.0), expected_norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_rows_against_exact_sums(generator: np.random.Generator, dtype: torch.dtype) -> None:
    rows = torch.from_numpy(generator.standard_normal((40, 501)) * np.logspace(-6, 6, 40)[:, None])
    rows = rows.to(dtype)
    norms = [exact_norm(row) for row in rows]
    np.testing.assert_allclose(row_norms(rows).numpy(), norms, rtol=1e-14)
    bound = 3.0
    factors = [min(1.0, bound / n) for n in norms]
    wide = rows.double().numpy()
    rtol = 1e-7 if dtype == torch.float32 else 1e-14
    np.testing.assert_allclose(
        clip(rows, bound).double().numpy(), wide * np.array(factors)[:, None], rtol=rtol
    )
    np.testing.assert_allclose(
        normalize(rows, bound).double().numpy(),
        wide * (bound / np.array(norms))[:, None],
        rtol=rtol,
    )
    assert clip(rows, bound).dtype == dtype


def test_rows_wider_than_a_block(generator: np.random.Generator) -> None:
    rows = torch.from_numpy(generator.standard_normal((3, 1_100_000)).astype(np.float32))
    rows[1] *= 1e-6
    expected = [math.sqrt(np.dot(r.astype(float), r.astype(float))) for r in rows.numpy()]
    np.testing.assert_allclose(row_norms(rows).numpy(), expected, rtol=1e-12)
    clipped = clip(rows, 1.0)
    assert torch.equal(clipped[1], rows[1])
    np.testing.assert_allclose(row_norms(clipped)[[0, 2]].numpy(), 1.0, rtol=1e-6)


def test_many_small_rows_are_taken_in_blocks(generator: np.random.Generator) -> None:
    rows = torch.from_numpy(generator.standard_normal((9000, 300)))
    expected = np.sqrt((rows.numpy() ** 2).sum(axis=1))
    np.testing.assert_allclose(row_norms(rows).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(
        clip(rows, 17.0).numpy(),
        rows.numpy() * np.minimum(1, 17.0 / expected)[:, None],
        rtol=1e-12,
    )


@pytest.mark.parametrize("size", [1e25, 3e38, 1e-40])
def test_float32_rows_of_extreme_size_are_bounded_without_overflow(size: float) -> None:
    rows = torch.full((1, 10_000), size, dtype=torch.float32)
    entry = float(rows[0, 0])
    assert float(row_norms(rows)) == pytest.approx(entry * 100, rel=1e-12)
    torch.testing.assert_close(normalize(rows, 5.0), torch.full((1, 10_000), 0.05))
    if size > 1:
        torch.testing.assert_close(clip(rows, 5.0), torch.full((1, 10_000), 0.05))
    else:
        assert torch.equal(clip(rows, 5.0), rows)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_float64_rows_of_extreme_size_are_bounded_without_overflow(size: float) -> None:
    rows = torch.tensor([[3.0 * size, -4.0 * size], [3.0, -4.0], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([5.0 * size, 5.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(row_norms(rows), expected, rtol=1e-14, atol=0)
    unit = torch.tensor([[0.6, -0.8], [0.6, -0.8], [0, 0]], dtype=torch.float64)
    torch.testing.assert_close(normalize(rows, 1.0), unit, rtol=1e-14, atol=0)


def test_infinite_bound_clips_nothing_but_copies(generator: np.random.Generator) -> None:
    rows = torch.from_numpy(generator.standard_normal((4, 5)))
    result = clip(rows, INF)
    assert torch.equal(result, rows)
    result.zero_()
    assert rows.abs().min() > 0


@pytest.mark.parametrize("function", [clip, normalize])
def test_inputs_are_left_as_they_are(generator: np.random.Generator, function: Bounding) -> None:
    rows = torch.from_numpy(generator.standard_normal((4, 5)) * 100)
    before = rows.clone()
    result = function(rows, 1.0)
    assert torch.equal(rows, before)
    assert result.data_ptr() != rows.data_ptr()


def test_single_vectors_and_numpy_arrays(generator: np.random.Generator) -> None:
    row = generator.standard_normal(8)
    length = exact_norm(row)
    assert clip(row, 0.5).shape == (8,)
    np.testing.assert_allclose(clip(row, 0.5).numpy(), row * 0.5 / length, rtol=1e-14)
    np.testing.assert_allclose(normalize(row, 9.0).numpy(), row * 9.0 / length, rtol=1e-14)


def test_no_rows_give_no_rows() -> None:
    empty = torch.zeros(0, 5)
    assert clip(empty, 1.0).shape == (0, 5)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("function", [clip, normalize])
def test_a_non_finite_row_never_passes_as_a_bounded_one(function: Bounding, bad: float) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    result = function(rows, 1.0)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], torch.full((2, 4), 0.5))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("function", [clip, normalize])
def test_bounds_out_of_range(function: Bounding, bound: float) -> None:
    with pytest.raises(ValueError, match=f"bound must be positive.*got {bound}"):
        function(torch.ones(2, 2), bound)


def test_there_is_no_infinite_normalisation() -> None:
    with pytest.raises(ValueError, match="positive and finite: got inf"):
        normalize(torch.ones(2, 2), INF)


@pytest.mark.parametrize("function", [clip, normalize])
def test_unusable_updates(function: Bounding) -> None:
    with pytest.raises(ValueError, match=r"shape \[K, d\]"):
        function(torch.ones(2, 2, 2), 1.0)
    with pytest.raises(ValueError, match="float32 or float64"):
        function(torch.ones(2, 2, dtype=torch.int64), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda value: FatClippingPI(value, local_steps=2),
        FatClippingPR,
        CEFedAvg,
        ModelClipping,
        ClipNorm,
    ],
)
@pytest.mark.parametrize("value", [ClipNorm(1.0), "1", None, -1.0, 0, float("nan")])
def test_a_clip_norm_that_is_no_positive_number_is_refused_by_name(
    make: Callable[[Any], object], value: object
) -> None:
    said = re.escape(f"clip_norm = {value!r} is not allowed: a number greater than 0")
    with pytest.raises(ValueError, match=said):
        make(value)
    make(np.float32(1.0))


def test_a_plan_without_a_unit_of_its_clip_norm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip_norm = 3\.0 is not allowed: a ClipNorm"):
        PrivacyPlan(3.0, 1.0, 10, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip_units = 'metres' is not allowed: gradient or"):
        ClipNorm(1.0, "metres")  # type: ignore[arg-type]
