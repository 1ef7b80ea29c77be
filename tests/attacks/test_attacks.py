"""The vector attacks and label-flip against naive definitions and their properties."""

import math
from collections.abc import Callable
from statistics import NormalDist, fmean, pstdev

import numpy as np
import pytest
import torch

from blackthorn import attacks
from blackthorn.attacks import ServerRule
from blackthorn.attacks.distance_attacks import Perturbation
from blackthorn.attacks.vector_attacks import VectorFunction, baruch_z

NUM_CLIENTS = 200
# condition(vector [d], seen [b, d]) -> the ratio that must not exceed 1
Condition = Callable[[torch.Tensor, torch.Tensor], float]


def philox(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def gaussian(rows: int, d: int, seed: int = 0) -> torch.Tensor:
    """Rows around a common mean, float64."""
    draw = philox(seed)
    return torch.from_numpy(draw.standard_normal(d) + 0.5 * draw.standard_normal((rows, d)))


def vector_attack(name: str) -> attacks.VectorAttack:
    attack = attacks.get(name)
    assert attack.kind == "vector"
    return attack


def run(
    name: str,
    own: torch.Tensor,
    num_clients: int = NUM_CLIENTS,
    seed: int = 0,
    honest: torch.Tensor | None = None,
) -> torch.Tensor:
    attack = vector_attack(name)
    return attack(
        own,
        num_clients=num_clients,
        generator=philox(seed),
        honest=honest,
        rule=ServerRule(plain_mean),
    )


def plain_mean(updates: torch.Tensor) -> torch.Tensor:
    """The server's rule, for the attack that asks."""
    return updates.mean(dim=0)


def naive_mean(rows: torch.Tensor) -> list[float]:
    return [fmean(column) for column in zip(*rows.tolist(), strict=True)]


# A.1 to A.6


def test_random_gradient_keeps_the_norms_and_nothing_else() -> None:
    own = gaussian(4, 10_000) * torch.tensor([[1.0], [10.0], [1e-3], [0.0]])
    sent = run("random-gradient", own, seed=17)
    for before, after in zip(own, sent, strict=True):
        assert math.isclose(before.norm(), after.norm(), rel_tol=1e-12)
    # Cosines of independent directions have standard deviation 1 / sqrt(d) = 0.01.
    rows = torch.cat([sent[:3], own[:3]])
    directions = rows / rows.norm(dim=1, keepdim=True)
    cosines = (directions[:3] @ directions.T).fill_diagonal_(0)
    assert cosines.abs().max() < 0.06


def test_random_gradient_is_isotropic_gaussian() -> None:
    own = torch.full((1, 20_000), 2.0, dtype=torch.float64)
    entries = run("random-gradient", own)[0] / 2.0
    assert abs(entries.mean()) < 0.05
    assert math.isclose((entries**4).mean(), 3.0, abs_tol=0.3)  # a Gaussian's fourth moment


def test_random_gradient_follows_its_generator() -> None:
    own = gaussian(3, 50)
    assert torch.equal(run("random-gradient", own, seed=1), run("random-gradient", own, seed=1))
    assert not torch.equal(run("random-gradient", own, seed=1), run("random-gradient", own, seed=2))


@pytest.mark.parametrize(
    ("name", "factor"), [("reverse-average", -1), ("reverse-scaled-average", -50)]
)
def test_reversed_averages_are_minus_the_mean_and_minus_a_hundred_times_it(
    name: str, factor: int
) -> None:
    own = gaussian(5, 30)
    expected = [factor * entry for entry in naive_mean(own)]
    for row in run(name, own).tolist():
        assert row == pytest.approx(expected, rel=1e-12)


def test_gradient_shift_is_one_standard_normal_vector_for_all() -> None:
    own = gaussian(6, 40_000)
    shifts = (run("gradient-shift", own) - own) / 50
    assert torch.allclose(shifts, shifts[:1].expand_as(shifts), atol=1e-12)
    assert abs(shifts[0].mean()) < 0.03
    assert math.isclose(shifts[0].std(), 1.0, abs_tol=0.02)
    assert abs(shifts[0].quantile(0.8413) - 1.0) < 0.05


def test_gradient_shift_does_not_depend_on_how_many_collude() -> None:
    own = gaussian(6, 30)
    together = run("gradient-shift", own, seed=5)
    for i in range(len(own)):
        assert torch.allclose(run("gradient-shift", own[i : i + 1], seed=5)[0], together[i])


def test_all_ones_is_ones_whatever_was_learnt() -> None:
    assert run("all-ones", gaussian(3, 4)).tolist() == [[1.0] * 4] * 3


def test_baruch_s_z_is_the_paper_s() -> None:
    # K = 200, b = 25: h = 101 - 25 = 76, Phi(z) = (175 - 76) / 175 = 0.565714, z = 0.16547.
    assert baruch_z(200, 25) == pytest.approx(0.16547, abs=2e-5)
    # K = 50, b = 24 (the paper's): h = 2, Phi(z) = 24 / 26, z = 1.426.
    assert baruch_z(50, 24) == pytest.approx(1.426, abs=1e-3)
    # K = 3, b = 1: h = 1, Phi(z) = 1 / 2.
    assert baruch_z(3, 1) == pytest.approx(0.0, abs=1e-12)


def test_baruch_z_is_finite_everywhere_and_the_formula_where_that_is_defined() -> None:
    for num_clients in range(1, 30):
        for num_corrupt in range(1, num_clients + 1):
            z = baruch_z(num_clients, num_corrupt)
            assert math.isfinite(z)
            supporters = num_clients // 2 + 1 - num_corrupt
            honest = num_clients - num_corrupt
            if 0 < supporters < honest:
                expected = NormalDist().inv_cdf((honest - supporters) / honest)
                assert z == pytest.approx(expected, abs=1e-9)
            elif supporters <= 0 and honest > 1:
                assert z > 0


def test_baruch_is_the_mean_less_z_deviations_in_every_coordinate() -> None:
    own = gaussian(25, 12)
    z = NormalDist().inv_cdf(99 / 175)
    expected = [fmean(c) - z * pstdev(c) for c in zip(*own.tolist(), strict=True)]
    for row in run("baruch", own).tolist():
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-12)


# Omniscient attackers


@pytest.mark.parametrize("name", ["baruch", "inner-product", "mimic", "min-max", "min-sum"])
def test_omniscient_attackers_use_the_honest_updates_alone(name: str) -> None:
    own, honest = gaussian(25, 9, seed=1), gaussian(25, 9, seed=2)
    assert torch.equal(run(name, own, honest=honest), run(name, honest))
    assert torch.equal(run(name, own, honest=honest[:0]), run(name, own))


@pytest.mark.parametrize(
    "name",
    ["random-gradient", "reverse-average", "gradient-shift", "all-ones", "sign-flip"],
)
def test_other_attacks_are_defined_by_the_colluders_own_updates(name: str) -> None:
    own = gaussian(5, 9, seed=1)
    assert torch.equal(run(name, own, honest=gaussian(7, 9, seed=2)), run(name, own))


# Sign flip, inner product, mimic


def test_sign_flip_is_everybody_s_own_update_negated() -> None:
    own = gaussian(3, 7)
    assert run("sign-flip", own).tolist() == [[-entry for entry in row] for row in own.tolist()]


def test_inner_product_points_against_the_mean() -> None:
    own = gaussian(4, 11)
    for row in run("inner-product", own).tolist():
        assert row == pytest.approx([-0.1 * entry for entry in naive_mean(own)], rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_mimic_copies_the_row_furthest_along_the_principal_direction(seed: int) -> None:
    own = gaussian(6, 15, seed=seed)
    centred = own.numpy() - own.numpy().mean(axis=0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    copied = own[int(np.abs(centred @ directions[:, -1]).argmax())]
    assert torch.equal(run("mimic", own), copied.expand(6, 15))


# Min-max and min-sum


def naive_max_condition(vector: torch.Tensor, seen: torch.Tensor) -> float:
    """Furthest distance of `vector` over the furthest between two rows."""
    between = max(math.dist(a, b) for a in seen.tolist() for b in seen.tolist())
    return max(math.dist(vector.tolist(), a) for a in seen.tolist()) / between


def naive_sum_condition(vector: torch.Tensor, seen: torch.Tensor) -> float:
    """Sum of squared distances of `vector` over the largest of a row."""
    rows = seen.tolist()
    largest = max(sum(math.dist(a, b) ** 2 for b in rows) for a in rows)
    return sum(math.dist(vector.tolist(), a) ** 2 for a in rows) / largest


@pytest.mark.parametrize("perturbation", ["deviation", "unit", "sign"])
@pytest.mark.parametrize(
    ("attack", "condition"),
    [(attacks.min_max, naive_max_condition), (attacks.min_sum, naive_sum_condition)],
)
@pytest.mark.parametrize("seed", range(5))
def test_distance_attacks_go_exactly_as_far_as_they_may(
    attack: VectorFunction, condition: Condition, perturbation: Perturbation, seed: int
) -> None:
    seen = gaussian(7, 10, seed=seed) * (1 + seed)
    average = torch.tensor(naive_mean(seen), dtype=torch.float64)
    directions = {
        "deviation": [-pstdev(column) for column in zip(*seen.tolist(), strict=True)],
        "unit": (-average / math.hypot(*average.tolist())).tolist(),
        "sign": [-math.copysign(1.0, entry) for entry in average.tolist()],
    }
    direction = torch.tensor(directions[perturbation], dtype=torch.float64)
    low, high = 0.0, 1e6  # bisection on the paper's condition
    for _ in range(100):
        gamma = (low + high) / 2
        fits = condition(average + gamma * direction, seen) <= 1
        low, high = (gamma, high) if fits else (low, gamma)
    sent = attack(seen, num_clients=50, generator=philox(0), perturbation=perturbation)
    assert torch.allclose(sent, (average + low * direction).expand_as(seen), rtol=1e-9, atol=1e-9)
    assert condition(sent[0], seen) == pytest.approx(1.0, abs=1e-9)
    assert low > 0.1


def test_an_unknown_perturbation_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'sideways'; allowed are 'deviation', 'unit' and 'sign'"):
        attacks.min_max(
            gaussian(3, 4),
            num_clients=9,
            generator=philox(0),
            perturbation="sideways",  # type: ignore[arg-type]
        )


# What all have in common

DEGENERATE = {
    "one client": gaussian(1, 8),
    "a zero row": torch.cat([gaussian(3, 8), torch.zeros(1, 8, dtype=torch.float64)]),
    "all zero": torch.zeros(3, 8),
    "equal rows": gaussian(1, 8).repeat(4, 1),
    "two clusters": torch.tensor([[1.0, 2.0], [1.0, 2.0], [-1.0, 5.0], [-1.0, 5.0]]),
    "huge rows": torch.cat([torch.full((2, 8), 1e25), torch.ones(2, 8)]),
    "one parameter": gaussian(3, 1),
}


@pytest.mark.parametrize("name", attacks.names("vector"))
@pytest.mark.parametrize("case", DEGENERATE)
def test_updates_that_are_alike_or_zero_or_few_give_finite_lies(name: str, case: str) -> None:
    own = DEGENERATE[case]
    before = own.clone()
    for num_clients in (len(own), len(own) + 1, 2 * len(own), 3 * len(own)):
        sent = run(name, own, num_clients=num_clients)
        assert sent.shape == own.shape
        assert torch.isfinite(sent).all()
    assert torch.equal(own, before)


@pytest.mark.parametrize("name", attacks.names("vector"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept_and_numpy_is_accepted(name: str, dtype: torch.dtype) -> None:
    own = gaussian(4, 6).to(dtype)
    sent = run(name, own)
    assert sent.dtype == dtype
    from_numpy = run(name, own.numpy())  # type: ignore[arg-type]
    assert torch.equal(from_numpy, sent)


@pytest.mark.parametrize("name", attacks.names("vector"))
def test_a_diverged_model_does_not_stop_the_attack(name: str) -> None:
    own = torch.tensor([[math.nan, 1.0], [2.0, math.inf]])
    assert run(name, own).shape == own.shape


@pytest.mark.parametrize("name", attacks.names("vector"))
@pytest.mark.parametrize(
    "own", [torch.ones(3), torch.empty(0, 3), torch.ones(2, 3, dtype=torch.int64)]
)
def test_what_is_no_matrix_of_updates_is_refused(name: str, own: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="own updates have shape"):
        run(name, own)


# Label flip and the names


def test_flipped_labels_count_from_the_other_end() -> None:
    y = torch.tensor([0, 1, 9, 4])
    assert attacks.flip_labels(y, 10).tolist() == [9, 8, 0, 5]
    assert y.tolist() == [0, 1, 9, 4]
    by_name = attacks.get("label-flip")
    assert by_name.kind == "data"
    assert by_name(y, 10).dtype == torch.int64
    with pytest.raises(ValueError, match="num_classes is 0"):
        attacks.flip_labels(y, 0)


def test_every_name_is_found_under_its_kind() -> None:
    assert len(attacks.names()) == len(set(attacks.names())) >= 26
    for kind in ("vector", "data", "reply"):
        assert attacks.names(kind)
        for name in attacks.names(kind):
            assert attacks.get(name).kind == kind
            assert attacks.get(name).name == name
    assert attacks.names("data") == ("label-flip",)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="attack is 'gradient'") as refusal:
        attacks.get("gradient")
    assert all(name in str(refusal.value) for name in attacks.names())
    assert "\n" not in str(refusal.value)
