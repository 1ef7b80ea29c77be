"""Noise that hangs together over b rounds, against dense matrices written down here."""

import itertools
import math
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from blackthorn.strategies import (
    ClipNorm,
    FullParticipation,
    PrivacyPlan,
    Release,
    RotatingParticipation,
    calibrated,
)
from blackthorn.strategies.noise_record import (
    NoiseRecord,
    Recorded,
    band_coefficients,
    noise_file,
    round_deviations,
    summed_deviations,
)


def dense(bands: int, rounds: int) -> np.ndarray:
    """C [T, T], lower triangular Toeplitz with columns of length 1 (but for those that the last
    round cuts off), by exact binomials."""
    series = [math.comb(2 * j, j) / 4**j for j in range(bands)]
    length = math.sqrt(sum(c * c for c in series))
    matrix = np.zeros((rounds, rounds))
    for row, column in itertools.product(range(rounds), repeat=2):
        if 0 <= row - column < bands:
            matrix[row, column] = series[row - column] / length
    return matrix


def noises(bands: int, fresh: np.ndarray) -> np.ndarray:
    record = NoiseRecord(bands)
    return np.stack([record.noise(t + 1, row) for t, row in enumerate(fresh)])


@pytest.mark.parametrize("bands", [1, 2, 5, 9, 20])
def test_the_noise_is_that_of_the_dense_matrix(bands: int) -> None:
    """C ẑ = z, whatever z is."""
    fresh = np.random.default_rng(3).standard_normal((25, 4))
    expected = np.linalg.solve(dense(bands, 25), fresh)
    np.testing.assert_allclose(noises(bands, fresh), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bands", [1, 3, 20])
def test_the_deviations_of_sums_and_of_rounds_are_those_of_the_dense_matrix(bands: int) -> None:
    prefixes = np.tril(np.ones((30, 30))) @ np.linalg.inv(dense(bands, 30))
    expected = np.linalg.norm(prefixes, axis=1)
    np.testing.assert_allclose(summed_deviations(bands, 30), expected, rtol=1e-9)
    alone = np.linalg.norm(np.linalg.inv(dense(bands, 30)), axis=1)
    np.testing.assert_allclose(round_deviations(bands, 30), alone, rtol=1e-9)


def plan(groups: int, bands: int, rounds: int = 100) -> PrivacyPlan:
    turns = RotatingParticipation(groups) if groups > 1 else FullParticipation()
    plan = PrivacyPlan(
        ClipNorm(1.0), 1.0, 300, rounds, turns, delta=1e-5, bands=bands, accountant="pld"
    )
    return calibrated(plan, 5.0)


@pytest.mark.parametrize(
    ("groups", "bands", "expected"),
    [
        (1, 1, 63.4),
        (5, 1, 28.3),
        (5, 5, 15.1),
        (10, 1, 20.0),
        (10, 10, 8.57),
        (20, 1, 14.2),
        (20, 20, 5.17),
    ],
)
def test_the_error_of_sums_at_epsilon_5(groups: int, bands: int, expected: float) -> None:
    found = plan(groups, bands)
    deviations = found.noise_multiplier * summed_deviations(bands, 100)
    assert math.sqrt(np.mean(deviations**2)) == pytest.approx(expected, rel=0.005)


def _patterns(rounds: int, apart: int) -> list[tuple[int, ...]]:
    """Every set of rounds of which any two are `apart` or more."""
    return [
        chosen
        for size in range(rounds + 1)
        for chosen in itertools.combinations(range(rounds), size)
        if all(b - a >= apart for a, b in itertools.pairwise(chosen))
    ]


def _most(bands: int, rounds: int, apart: int) -> float:
    """How far, squared, one client of norm 1 a round moves C times the updates at most: over all
    patterns and all signs of what it sends."""
    matrix = dense(bands, rounds)
    return max(
        float(np.square(matrix[:, list(chosen)] @ np.array(signs)).sum()) if chosen else 0.0
        for chosen in _patterns(rounds, apart)
        for signs in itertools.product((-1.0, 1.0), repeat=len(chosen))
    )


@pytest.mark.parametrize("rounds", range(1, 9))
@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("banded", [True, False])
def test_no_pattern_of_turns_moves_the_release_by_more_than_is_charged(
    rounds: int, groups: int, banded: bool
) -> None:
    """Exhaustively: ⌈T/b⌉ compositions; and one round less apart they would be too few."""
    bands = groups if banded else 1
    charged = -(-rounds // groups)
    assert _most(bands, rounds, groups) <= charged + 1e-12
    if banded and rounds > groups:
        assert _most(bands, rounds, groups - 1) > charged + 1e-3


@pytest.mark.parametrize("rounds", range(1, 9))
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_turns_are_such_a_pattern(rounds: int, groups: int) -> None:
    turns = RotatingParticipation(groups, seed=5)
    for client in [*range(7), 2**63 - 25]:
        joins = [
            t - 1
            for t in range(1, rounds + 1)
            if client in turns.of_round([*range(7), 2**63 - 25], t, places=7).clients
        ]
        assert tuple(joins) in _patterns(rounds, groups)
        assert len(joins) <= -(-rounds // groups)
        assert rounds < groups or joins


@pytest.mark.parametrize(("rounds", "turns"), [(1, 1), (5, 1), (6, 2), (100, 20), (101, 21)])
@pytest.mark.parametrize("neighbours", ["zero-out", "add-remove", "replace-one"])
def test_the_charge_is_another_librarys_for_so_many_rounds_of_a_client(
    rounds: int, turns: int, neighbours: str
) -> None:
    z = 4.0
    found = PrivacyPlan(
        ClipNorm(1.0),
        z,
        300,
        rounds,
        RotatingParticipation(5),
        bands=5,
        neighbours=neighbours,  # type: ignore[arg-type]
    ).figure()
    accountant = RdpAccountant([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)))
    effective = z / 2 if neighbours == "replace-one" else z
    accountant.compose(dp_accounting.GaussianDpEvent(effective), turns)
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)


def test_noise_and_release_are_on_disk_for_the_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    record = NoiseRecord(3, folder)
    rng = np.random.default_rng(0)
    for t in (1, 2, 3):
        record.noise(t, rng.standard_normal(5))
        record.keep(t, Recorded(np.full(5, float(t)), Release(2.0, groups=3)))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    again = NoiseRecord(3, folder)
    for t in (1, 3):
        recorded = again.released(t)
        assert recorded is not None
        np.testing.assert_array_equal(recorded.vector, np.full(5, float(t)))
        assert recorded.release == Release(2.0, groups=3)
    assert again.released(4) is None


@pytest.mark.parametrize("died_after", [1, 2, 3, 4])
def test_the_noise_goes_on_from_a_state_and_the_rounds_since(
    tmp_path: Path, died_after: int
) -> None:
    """The state is of round 1; what came later is in the folder."""
    fresh = np.random.default_rng(1).standard_normal((6, 3))
    expected = noises(3, fresh)
    record = NoiseRecord(3, tmp_path)
    values = {}
    for t in range(1, died_after + 1):
        record.noise(t, fresh[t - 1])
        record.keep(t, Recorded(np.zeros(3), Release(2.0, groups=3)))
        if t == 1:
            values = record.values(1)
    again = NoiseRecord(3, tmp_path)
    again.restore(values)
    for t in range(2, 7):
        if again.released(t) is None:
            np.testing.assert_array_equal(again.noise(t, fresh[t - 1]), expected[t - 1])


def test_what_two_states_know_is_no_longer_on_record(tmp_path: Path) -> None:
    record = NoiseRecord(2, tmp_path)
    for t in range(1, 7):
        record.noise(t, np.ones(2))
        record.keep(t, Recorded(np.ones(2), Release(2.0, groups=2)))
        if t % 2 == 0:
            record.values(t)
    kept = [t for t in range(1, 7) if noise_file(tmp_path, t).exists()]
    # States of rounds 4 and 6: should the newer be damaged, rounds 5 and 6 are done again.
    assert kept == [3, 4, 5, 6]


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    record = NoiseRecord(2, tmp_path)
    noise_file(tmp_path, 1).write_bytes(b"PK torn")
    with pytest.raises(ValueError, match=r"noise-00001\.npz is damaged"):
        record.released(1)


def test_coefficients_have_length_1() -> None:
    for bands in (1, 2, 50):
        assert np.square(band_coefficients(bands)).sum() == pytest.approx(1.0, rel=1e-14)
