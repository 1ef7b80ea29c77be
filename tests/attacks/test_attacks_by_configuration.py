"""Every attack on the update by configuration: what the server receives in a run, against the
definition applied to what the same clients send when nobody lies."""

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from digits_runs import run

from blackthorn import attacks
from blackthorn.strategies import RoundReport

CLIENTS, BYZANTINE = 9, 4
HONEST = CLIENTS - BYZANTINE


def first_round(folder: Path, **options: Any) -> np.ndarray:
    """The updates [K, d] of round 1 as the server screened them, float64."""
    reports: list[RoundReport] = []
    settings = {"num_clients": CLIENTS, "num_server_rounds": 1, "instruments": False}
    run(folder, [reports.append], **{**settings, **options})
    assert reports[1].accepted == list(range(CLIENTS))
    assert reports[1].updates is not None
    return reports[1].updates.double().numpy()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """What all would honestly send: without randomness, the same in every run."""
    return first_round(tmp_path_factory.mktemp("honest"))


def sent(folder: Path, truth: np.ndarray, attack: str, **options: Any) -> np.ndarray:
    """What the attackers send [b, d]; the others send the truth."""
    updates = first_round(folder, attack=attack, num_byzantine=BYZANTINE, **options)
    np.testing.assert_allclose(updates[:HONEST], truth[:HONEST], atol=1e-6)
    return updates[HONEST:]


def close(found: np.ndarray, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=2e-5 * scale)


def known(truth: np.ndarray, omniscient: bool) -> np.ndarray:
    """Whom the attacker takes its statistics from: its fellows, or all the honest clients."""
    return truth[:HONEST] if omniscient else truth[HONEST:]


BOTH = pytest.mark.parametrize("omniscient", [False, True], ids=["fellows", "omniscient"])


@BOTH
def test_inner_product_sends_a_tenth_of_the_mean_reversed(
    tmp_path: Path, truth: np.ndarray, omniscient: bool
) -> None:
    found = sent(tmp_path, truth, "inner-product", omniscient=omniscient)
    close(found, -0.1 * known(truth, omniscient).mean(axis=0))


@BOTH
def test_mimic_sends_the_update_furthest_along_the_principal_direction(
    tmp_path: Path, truth: np.ndarray, omniscient: bool
) -> None:
    seen = known(truth, omniscient)
    centred = seen - seen.mean(axis=0)
    direction = np.linalg.svd(centred)[2][0]
    copied = seen[np.abs(centred @ direction).argmax()]
    close(sent(tmp_path, truth, "mimic", omniscient=omniscient), copied)


@BOTH
def test_baruch_sends_the_mean_less_z_deviations(
    tmp_path: Path, truth: np.ndarray, omniscient: bool
) -> None:
    seen = known(truth, omniscient)
    supporters = CLIENTS // 2 + 1 - BYZANTINE
    z = NormalDist().inv_cdf((CLIENTS - BYZANTINE - supporters) / (CLIENTS - BYZANTINE))
    expected = seen.mean(axis=0) - z * seen.std(axis=0)
    close(sent(tmp_path, truth, "baruch", omniscient=omniscient), expected)


def spread_out(vector: np.ndarray, seen: np.ndarray, how: str) -> tuple[float, float]:
    """What the attack keeps at its limit, and the limit, both pair by pair."""
    between = [[float(((a - b) ** 2).sum()) for b in seen] for a in seen]
    to_vector = [float(((vector - a) ** 2).sum()) for a in seen]
    if how == "min-max":
        return math.sqrt(max(to_vector)), math.sqrt(max(max(row) for row in between))
    return sum(to_vector), max(sum(row) for row in between)


@BOTH
@pytest.mark.parametrize("attack", ["min-max", "min-sum"])
def test_distance_attacks_go_to_their_limit_against_the_mean(
    tmp_path: Path, truth: np.ndarray, attack: str, omniscient: bool
) -> None:
    seen = known(truth, omniscient)
    found = sent(tmp_path, truth, attack, omniscient=omniscient)
    close(found, found[:1])  # all alike
    reached, limit = spread_out(found[0], seen, attack)
    assert reached == pytest.approx(limit, rel=1e-4)
    # Against the mean, along the deviation of the coordinates.
    away, deviation = found[0] - seen.mean(axis=0), -seen.std(axis=0)
    cosine = away @ deviation / np.linalg.norm(away) / np.linalg.norm(deviation)
    assert cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("attack", "factor"),
    [("reverse-average", -1), ("reverse-scaled-average", -50)],
)
def test_reversed_averages_are_of_all_colluders_or_of_oneself(
    tmp_path: Path, truth: np.ndarray, attack: str, factor: int
) -> None:
    close(sent(tmp_path / "a", truth, attack), factor * truth[HONEST:].mean(axis=0))
    alone = sent(tmp_path / "b", truth, attack, collusion=False)
    close(alone, factor * truth[HONEST:])


def test_sign_flip_negates_and_all_ones_ignores_what_was_learnt(
    tmp_path: Path, truth: np.ndarray
) -> None:
    close(sent(tmp_path / "a", truth, "sign-flip"), -truth[HONEST:])
    close(sent(tmp_path / "b", truth, "all-ones"), np.ones(1))


def test_random_attacks_keep_lengths_or_share_one_normal_shift(
    tmp_path: Path, truth: np.ndarray
) -> None:
    own = truth[HONEST:]
    found = sent(tmp_path / "a", truth, "random-gradient")
    lengths = np.linalg.norm(found, axis=1)
    np.testing.assert_allclose(lengths, np.linalg.norm(own, axis=1), rtol=1e-4)
    cosines = np.corrcoef(np.concatenate([found, own])) - np.eye(2 * BYZANTINE)
    assert np.abs(cosines[:BYZANTINE]).max() < 0.25  # six deviations of 1/sqrt(650)
    shifts = (sent(tmp_path / "b", truth, "gradient-shift") - own) / 50
    close(shifts, shifts[:1])
    assert shifts[0].mean() == pytest.approx(0, abs=0.25)
    assert shifts[0].std() == pytest.approx(1, abs=0.2)


def test_adaptive_turns_the_configured_rule_and_not_another(
    tmp_path: Path, truth: np.ndarray
) -> None:
    """A mean of clipped updates is moved most by vectors beyond the bound, straight against it; by
    Krum these would not be chosen, and are not what is sent."""
    honest = truth[:HONEST]
    mean = honest.mean(axis=0)
    options = {"omniscient": True, "algorithm": "fat-clipping-pr", "clip_norm": 100.0}
    clipped = sent(tmp_path / "a", truth, "adaptive", **options)
    assert np.linalg.norm(clipped[0]) > 100
    assert clipped[0] @ mean / (np.linalg.norm(clipped[0]) * np.linalg.norm(mean)) < -0.99
    hidden = sent(
        tmp_path / "b", truth, "adaptive", omniscient=True, aggregator="krum", num_corrupt=3
    )
    assert np.linalg.norm(hidden[0]) < 10 * np.linalg.norm(honest, axis=1).max()
    close(hidden, hidden[:1])


def test_every_vector_attack_is_checked_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in attacks.names("vector") if f'"{name}"' not in source] == []


# Who they are.


def attackers_by_round(folder: Path, **options: Any) -> list[set[int]]:
    """The clients whose update in a round is all ones."""
    reports: list[RoundReport] = []
    run(folder, [reports.append], num_clients=12, attack="all-ones", num_byzantine=3,
        num_server_rounds=12, instruments=False, **options)  # fmt: skip
    found = []
    for report in reports[1:]:
        assert report.updates is not None
        ones = (report.updates - 1).abs().amax(dim=1) < 1e-3
        found.append({c for c, one in zip(report.accepted, ones.tolist(), strict=True) if one})
    return found


def test_the_fixed_set_is_the_last_ids(tmp_path: Path) -> None:
    assert attackers_by_round(tmp_path) == [{9, 10, 11}] * 12


def test_the_redrawn_set_is_another_every_round(tmp_path: Path) -> None:
    found = attackers_by_round(tmp_path / "a", byzantine_set="redrawn")
    assert {len(attackers) for attackers in found} == {3}
    assert len({frozenset(attackers) for attackers in found}) >= 8
    assert len(set.union(*found)) >= 9
    again = attackers_by_round(tmp_path / "b", byzantine_set="redrawn")
    other = attackers_by_round(tmp_path / "c", byzantine_set="redrawn", seed=1)
    assert again == found
    assert other != found
