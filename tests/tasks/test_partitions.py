"""Partitions: exact counts, and pure functions of (labels, scheme, clients, seed)."""

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from blackthorn.tasks.partitions import SCHEMES, partition

# MNIST's number of training images of each digit, in a fixed disorder.
MNIST_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(10), MNIST_COUNTS))
BALANCED_LABELS = np.random.default_rng(2).permutation(np.repeat(np.arange(10), 6000))
SMALL_LABELS = np.random.default_rng(3).permutation(np.repeat(np.arange(10), 143))
DISJOINT = ("iid", "label-shards", "classes-per-client", "dirichlet")


def label_counts(labels: np.ndarray, part: np.ndarray) -> np.ndarray:
    return np.bincount(labels[part], minlength=10)


def global_state() -> str:
    return repr(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_partition_is_pure(scheme: str) -> None:
    labels = SMALL_LABELS.copy()
    state = global_state()
    first = partition(labels, scheme, 12, 5)
    again = partition(torch.from_numpy(labels), scheme, 12, 5)
    other = partition(labels, scheme, 12, 6)
    assert global_state() == state
    np.testing.assert_array_equal(labels, SMALL_LABELS)
    assert len(first) == 12
    for part, twin in zip(first, again, strict=True):
        np.testing.assert_array_equal(part, twin)
    same = all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert same == (scheme == "full")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_clients", [1, 5, 60])
def test_parts_are_ascending_distinct_indices(scheme: str, num_clients: int) -> None:
    parts = partition(SMALL_LABELS, scheme, num_clients, 0)
    assert len(parts) == num_clients
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) >= 1
        assert (np.diff(part) > 0).all()
        assert part[0] >= 0
        assert part[-1] < len(SMALL_LABELS)


@pytest.mark.parametrize("scheme", DISJOINT)
def test_disjoint_schemes_use_every_example_once(scheme: str) -> None:
    parts = partition(SMALL_LABELS, scheme, 20, 4)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(SMALL_LABELS)))


def test_iid_parts_are_near_equal() -> None:
    sizes = Counter(len(part) for part in partition(SMALL_LABELS, "iid", 60, 0))
    assert sizes == {24: 50, 23: 10}


def test_iid_of_given_size_overlaps_only_when_the_examples_run_out() -> None:
    parts = partition(SMALL_LABELS, "iid", 14, 0, examples_per_client=100)
    assert [len(part) for part in parts] == [100] * 14
    assert len(np.unique(np.concatenate(parts))) == 1400
    parts = partition(SMALL_LABELS, "iid", 40, 0, examples_per_client=1000)
    assert {len(np.unique(part)) for part in parts} == {1000}


def test_full_gives_everybody_everything() -> None:
    for part in partition(SMALL_LABELS, "full", 3, 0):
        np.testing.assert_array_equal(part, np.arange(len(SMALL_LABELS)))


def test_label_shards_are_dealt_as_in_appendix_g() -> None:
    parts = partition(BALANCED_LABELS, "label-shards", 3000, 7)
    # 15000 shards of 4 examples, each of one label: the k-th group of 4 indices of that label.
    shard_of = np.empty(60_000, dtype=np.int64)
    for label in range(10):
        own = np.flatnonzero(BALANCED_LABELS == label)  # noqa: SIM300
        shard_of[own] = label * 1500 + np.arange(6000) // 4
    dealt = []
    for part in parts:
        assert len(part) == 20
        shards, sizes = np.unique(shard_of[part], return_counts=True)
        assert sizes.tolist() == [4] * 5
        dealt.extend(shards.tolist())
    assert sorted(dealt) == list(range(15_000))
    numbers_of_labels = Counter(len(np.unique(BALANCED_LABELS[part])) for part in parts)
    # P(5 distinct labels of 10) = 0.3024 for five independent draws.
    assert numbers_of_labels[5] / 3000 == pytest.approx(0.3024, abs=0.04)


@pytest.mark.parametrize("per_client", [1, 2, 3, 10])
def test_every_client_has_as_many_classes_as_asked_in_equal_shares(per_client: int) -> None:
    parts = partition(MNIST_LABELS, "classes-per-client", 50, 3, classes_per_client=per_client)
    counts = np.array([label_counts(MNIST_LABELS, part) for part in parts])
    assert ((counts > 0).sum(axis=1) == per_client).all()
    for label, total in enumerate(MNIST_COUNTS):
        held = counts[counts[:, label] > 0, label]
        assert len(held) == 50 * per_client // 10
        assert held.sum() == total
        assert held.max() - held.min() <= 1


def test_classes_are_combined_at_random() -> None:
    parts = partition(MNIST_LABELS, "classes-per-client", 500, 0)
    pairs = {tuple(np.unique(MNIST_LABELS[part])) for part in parts}
    assert pairs == set(combinations(range(10), 2))


def test_few_clients_leave_classes_out() -> None:
    parts = partition(SMALL_LABELS, "classes-per-client", 2, 0)
    assert [len(part) for part in parts] == [286, 286]


def test_a_dominant_label_is_800_of_1000_examples_on_mnist() -> None:
    parts = partition(MNIST_LABELS, "dominant-label", 200, 0)
    for part in parts:
        counts = label_counts(MNIST_LABELS, part)
        assert np.sort(counts)[::-1].tolist() == [800, 100, 100, 0, 0, 0, 0, 0, 0, 0]


def test_dominant_labels_are_uniform_and_pools_are_shared() -> None:
    parts = partition(MNIST_LABELS, "dominant-label", 4000, 1, examples_per_client=100)
    counts = np.array([label_counts(MNIST_LABELS, part) for part in parts])
    for size, share in ((80, 0.1), (10, 0.2)):
        frequency = (counts == size).mean(axis=0)
        # Five standard deviations of 4000 draws.
        np.testing.assert_allclose(frequency, share, atol=5 * (share / 4000) ** 0.5)
    # 4000 x 80 draws of about 6000 images a label, with replacement between clients.
    assert len(np.unique(np.concatenate(parts))) > 0.98 * 60_000


@pytest.mark.parametrize(
    ("num_clients", "size", "counts"),
    [(20, 0, [115, 14, 14]), (200, 0, [19, 2, 2]), (20, 150, [120, 15, 15]), (20, 3, [1, 1, 1])],
)
def test_a_dominant_label_s_share_scales_down(
    num_clients: int, size: int, counts: list[int]
) -> None:
    # 1430 examples: 10 * 1430 / (3 * 200) = 23 a client, and no more than a label's 143.
    for part in partition(SMALL_LABELS, "dominant-label", num_clients, 0, examples_per_client=size):
        assert sorted(label_counts(SMALL_LABELS, part).tolist())[:-4:-1] == counts


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_dirichlet_shares_have_the_right_variance(alpha: float) -> None:
    clients, n = 8, 2000
    labels = np.repeat(np.arange(100), n)
    parts = partition(labels, "dirichlet", clients, 11, dirichlet_alpha=alpha)
    shares = np.array([np.bincount(labels[part], minlength=100) / n for part in parts])
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert ((shares - 1 / clients) ** 2).mean() == pytest.approx(variance, rel=0.2)


def test_dirichlet_of_a_large_alpha_is_even() -> None:
    parts = partition(BALANCED_LABELS, "dirichlet", 10, 0, dirichlet_alpha=1e6)
    counts = np.array([label_counts(BALANCED_LABELS, part) for part in parts])
    np.testing.assert_allclose(counts, 600, atol=10)


def test_dirichlet_leaves_nobody_empty() -> None:
    parts = partition(SMALL_LABELS[:50], "dirichlet", 50, 0, dirichlet_alpha=1e-3)
    assert [len(part) for part in parts] == [1] * 50
    assert len(np.unique(np.concatenate(parts))) == 50


@pytest.mark.parametrize(
    ("size", "majority", "others"),
    [(0, 57, [1, 1, 1, 1, 1, 2, 2, 2]), (125, 57, [1] * 5 + [2] * 3), (500, 230, [5] * 8)],
)
def test_two_majority_labels_have_the_larger_counts(
    size: int, majority: int, others: list[int]
) -> None:
    parts = partition(MNIST_LABELS, "two-majority", 1920, 0, examples_per_client=size)
    chosen = np.zeros(10, dtype=int)
    for part in parts:
        counts = label_counts(MNIST_LABELS, part)
        assert sorted(counts) == [*others, majority, majority]
        chosen += counts == majority
    assert chosen.tolist() == [384] * 10


def test_two_majority_is_disjoint_as_long_as_the_pools_last() -> None:
    parts = partition(MNIST_LABELS, "two-majority", 400, 0)
    assert len(np.unique(np.concatenate(parts))) == 400 * 125
    # EMNIST's size: 1920 x 125 = 240000 examples asked for and there.
    emnist = np.repeat(np.arange(10), 24_000)
    parts = partition(emnist, "two-majority", 1920, 0)
    assert len(np.unique(np.concatenate(parts))) > 0.995 * 240_000


@pytest.mark.parametrize(
    ("scheme", "num_clients", "options", "message"),
    [
        ("idd", 2, {}, "partition 'idd' is unknown: allowed are iid, label-shards"),
        ("iid", 0, {}, "num-clients is 0: it must be at least 1"),
        ("iid", 31, {}, "num-clients is 31: .* needs 31 examples, and there are 30"),
        ("iid", 2, {"examples_per_client": 31}, "needs 31 examples, and there are 30"),
        ("iid", 2, {"examples_per_client": -1}, "examples-per-client is -1"),
        ("full", 2, {"examples_per_client": 5}, "partition 'full' has no such number"),
        ("dirichlet", 31, {}, "num-clients is 31"),
        ("dirichlet", 2, {"dirichlet_alpha": 0.0}, "dirichlet-alpha is 0.0: it must be above 0"),
        ("dirichlet", 2, {"dirichlet_alpha": float("nan")}, "dirichlet-alpha is nan"),
        ("dirichlet", 2, {"dirichlet_alpha": float("inf")}, "dirichlet-alpha is inf"),
        ("label-shards", 7, {}, "35 label shards needs 35 examples"),
        ("label-shards", 7, {"shards_per_client": 0}, "shards-per-client is 0"),
        ("classes-per-client", 2, {"classes_per_client": 0}, "classes-per-client is 0"),
        ("classes-per-client", 2, {"classes_per_client": 11}, "from 1 to 10"),
        ("classes-per-client", 30, {}, "6 of them would share the 3 examples of one label"),
        ("dominant-label", 2, {"examples_per_client": 10}, "8 distinct .* smallest has 3"),
        ("dominant-label", 50, {}, "gives a client 2 examples"),
        ("two-majority", 2, {}, "57 distinct examples of a label that has 3"),
        ("two-majority", 2, {"examples_per_client": 2}, "needs at least 3"),
    ],
)
def test_impossible_requests_are_one_line(
    scheme: str, num_clients: int, options: dict[str, Any], message: str
) -> None:
    labels = np.repeat(np.arange(10), 3)
    with pytest.raises(ValueError, match=message) as error:
        partition(labels, scheme, num_clients, 0, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scheme", ["dominant-label", "two-majority"])
def test_two_labels_are_too_few(scheme: str) -> None:
    with pytest.raises(ValueError, match="needs 3 labels: there are 2"):
        partition(np.repeat([0, 1], 500), scheme, 2, 0)


@pytest.mark.parametrize("labels", [np.zeros(0, dtype=np.int64), np.zeros((3, 2), dtype=np.int64)])
def test_labels_of_a_wrong_shape_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"labels have shape"):
        partition(labels, "iid", 1, 0)
