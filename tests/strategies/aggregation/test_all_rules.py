"""What all aggregation rules share, and each of them under attack."""

import numpy as np
import pytest
import torch
from rule_checks import BOTH_DTYPES, FloatType, attacked_rows, random_rows

from blackthorn.strategies import aggregation
from blackthorn.strategies.aggregation import Buckets, get, mean, mix, nearest_neighbours

ROBUST = [name for name in aggregation.RULES if name != "mean"]


@pytest.mark.parametrize("name", ROBUST)
def test_every_robust_rule_holds_where_the_mean_breaks(name: str) -> None:
    rows, honest = attacked_rows()
    plain = mean(rows).vector.numpy()
    robust = get(name)(rows, 4).vector.numpy()
    assert np.linalg.norm(plain - honest) > 100
    assert np.linalg.norm(robust - honest) < 6  # one honest row is 5 away from their mean
    assert not np.allclose(plain, robust)


@pytest.mark.parametrize("name", ROBUST)
def test_every_robust_rule_differs_from_the_mean_without_an_attack(name: str) -> None:
    """A rule that quietly fell back to the mean would pass as long as all rows are honest."""
    rows = random_rows(13, 20, 40, np.float64)
    difference = get(name)(rows, 4).vector.numpy() - rows.mean(axis=0)
    assert np.linalg.norm(difference) > 1e-3 * np.linalg.norm(rows.mean(axis=0))


@pytest.mark.parametrize("name", ROBUST)
def test_every_rule_composes_with_mixing(name: str) -> None:
    rows, honest = attacked_rows()
    mixed = mix(rows, nearest_neighbours(rows, 4))
    result = get(name)(mixed, 4)
    assert np.linalg.norm(result.vector.numpy() - honest) < 6
    b = 1
    rows[b:4] = rows[4:7]
    buckets = mix(rows, Buckets(2)(rows, b, np.random.default_rng(2)))
    assert buckets.shape == (10, 100)
    result = get(name)(buckets, b)
    assert np.linalg.norm(result.vector.numpy() - honest) < 6


@pytest.mark.parametrize(
    ("name", "count", "most"),
    [
        ("bulyan", 11, 2),
        ("bulyan", 14, 2),
        ("caf", 9, 4),
        ("centered-clipping", 10, 4),
        ("coordinate-median", 9, 4),
        ("coordinate-median", 10, 4),
        ("geometric-median", 9, 4),
        ("krum", 9, 3),
        ("krum", 10, 3),
        ("mda", 10, 4),
        ("mean-around-median", 9, 4),
        ("monna", 10, 4),
        ("multi-krum", 9, 3),
        ("rage", 9, 2),
        ("rage", 10, 3),
        ("smea", 9, 4),
        ("trimmed-mean", 9, 4),
        ("trimmed-mean", 10, 4),
    ],
)
def test_the_largest_number_of_corrupt_rows(name: str, count: int, most: int) -> None:
    rows = random_rows(14, count, 6, np.float64)
    get(name)(rows, most)
    with pytest.raises(ValueError, match=rf"{name} needs .*got num_corrupt = {most + 1}"):
        get(name)(rows, most + 1)
    with pytest.raises(ValueError, match="num_corrupt must be an integer of at least 0: got -1"):
        get(name)(rows, -1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["krum", "multi-krum", "bulyan"])
def test_rules_that_need_three_rows(name: str, count: int) -> None:
    with pytest.raises(ValueError, match="K is too small for any"):
        get(name)(np.zeros((count, 2)), 0)


@BOTH_DTYPES
@pytest.mark.parametrize("name", sorted(aggregation.RULES))
def test_every_rule_leaves_the_updates_as_they_are_and_keeps_their_dtype(
    name: str, dtype: FloatType
) -> None:
    rows = torch.from_numpy(random_rows(15, 11, 17, dtype))
    before = rows.clone()
    result = get(name)(rows, 2)
    assert torch.equal(rows, before)
    assert result.vector.dtype == rows.dtype
    assert result.vector.shape == (17,)
    assert result.weights.dtype == torch.float64
    assert result.survivors.dtype == torch.bool
    assert result.weights.shape == result.survivors.shape == (11,)
    assert torch.equal(result.survivors, result.weights > 0)
    assert result.vector.data_ptr() != rows.data_ptr()
    # The same rows as a numpy array, and read through other strides.
    assert torch.equal(get(name)(rows.numpy(), 2).vector, result.vector)
    assert torch.equal(get(name)(rows.T.contiguous().T, 2).vector, result.vector)


@pytest.mark.parametrize("name", sorted(aggregation.RULES))
@pytest.mark.parametrize("value", [0.0, 0.1, -1e25])
def test_equal_rows_give_that_row(name: str, value: float) -> None:
    rows = torch.full((11, 5), value)
    assert torch.equal(get(name)(rows, 2).vector, rows[0])


@pytest.mark.parametrize("name", sorted(aggregation.RULES))
def test_every_rule_refuses_updates_of_no_shape_dtype_or_size(name: str) -> None:
    rule = get(name)
    with pytest.raises(ValueError, match="no updates to aggregate: got K = 0"):
        rule(torch.zeros(0, 3), 0)
    with pytest.raises(ValueError, match=r"shape \[K, d\], d >= 1: got \[3\]"):
        rule(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="float32 or float64"):
        rule(torch.zeros(3, 3, dtype=torch.int64), 0)
    for bad in (float("nan"), float("inf"), -1e150):
        rows = torch.zeros(3, 3, dtype=torch.float64)
        rows[2, 0] = bad
        with pytest.raises(ValueError, match="row 2 is not"):
            rule(rows, 0)


def test_a_rule_is_got_by_its_name_and_another_name_is_refused() -> None:
    for name in ROBUST:
        assert get(name) is getattr(aggregation, name.replace("-", "_"))
    rows = random_rows(16, 5, 3, np.float64)
    assert torch.equal(get("mean")(rows, 2).vector, mean(rows).vector)
    weighted = get("mean")(rows, weights=[1, 0, 0, 0, 0])
    np.testing.assert_allclose(weighted.vector.numpy(), rows[0])
    names = ", ".join(aggregation.RULES)
    with pytest.raises(ValueError, match=f"must be one of {names}: got 'medain'"):
        get("medain")


def test_who_has_a_weight_survives_unless_said_otherwise() -> None:
    found = aggregation.Aggregate(torch.ones(2), torch.tensor([0.5, 0.0, 0.5]))
    assert found.survivors.tolist() == [True, False, True]
