"""Whom scores convict: liars that stand out; and not the innocent, whatever a rule filters."""

import numpy as np
import pytest
import torch

from blackthorn import attacks
from blackthorn.recording.suspects import verdict
from blackthorn.strategies.aggregation import caf
from blackthorn.strategies.suspicion import LEVEL, SCORES, p_values, round_scores

K, B, D, ROUNDS = 20, 4, 40, 8


def centre_of(rows: np.ndarray) -> np.ndarray:
    """The geometric median, by many steps of Weiszfeld's algorithm."""
    centre = rows.mean(axis=0)
    for _ in range(20):
        weights = 1 / np.linalg.norm(rows - centre, axis=1)
        centre = weights @ rows / weights.sum()
    return centre


def test_scores_are_their_definitions() -> None:
    rows = np.random.default_rng(2).standard_normal((9, 6)) + 0.5
    centre = centre_of(rows)
    distances = np.linalg.norm(rows - centre, axis=1)
    _, _, axes = np.linalg.svd(rows - rows.mean(axis=0))
    mass = ((rows - rows.mean(axis=0)) @ axes[0]) ** 2
    expected = np.stack(
        [
            np.log(distances / np.median(distances)),
            -(rows @ centre) / (centre @ centre),
            np.log(np.maximum(9 * mass / mass.sum(), 1e-3)),
        ],
        axis=1,
    )
    np.testing.assert_allclose(round_scores(rows), expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(round_scores(1e-3 * rows), expected, rtol=1e-6, atol=1e-9)


def unlike(seed: int) -> np.ndarray:
    """What K clients hold: each main label of ten a direction, drawn as dominant-label does."""
    generator = np.random.default_rng(seed)
    labels = generator.standard_normal((10, D))
    held = np.array([generator.permutation(10)[:3] for _ in range(K)])
    return 0.8 * labels[held[:, 0]] + 0.1 * labels[held[:, 1]] + 0.1 * labels[held[:, 2]]


def rounds_of(seed: int, lie: str = "none", alike: bool = False) -> dict[int, list[list[float]]]:
    means = np.ones((K, D)) if alike else unlike(seed)
    generator = np.random.default_rng((seed, 1))
    scores: dict[int, list[list[float]]] = {client: [] for client in range(K)}
    for _ in range(5 if lie == "adaptive" else ROUNDS):
        rows = torch.from_numpy(means + 0.5 * generator.standard_normal((K, D)))
        own, honest = rows[-B:], rows[:-B]
        if lie != "none":
            attack = attacks.get(lie)
            assert isinstance(attack, attacks.VectorAttack)
            rows[-B:] = attack(
                own.clone(),
                num_clients=K,
                generator=generator,
                honest=honest,
                rule=attacks.ServerRule(lambda updates: caf(updates, B).vector, by_products=True),
            )
        for client, row in enumerate(round_scores(rows)):
            scores[client].append(row.tolist())
    return scores


def accused(scores: dict[int, list[list[float]]]) -> set[int]:
    return {suspect["client"] for suspect in verdict(scores)["clients"]}


LIARS = set(range(K - B, K))


@pytest.mark.parametrize("alike", [False, True])
def test_without_liars_fewer_than_one_run_in_a_hundred_accuses_anybody(alike: bool) -> None:
    runs = 60
    wrong = sum(bool(accused(rounds_of(seed, alike=alike))) for seed in range(runs))
    # At that probability three or more come about twice in a hundred suites.
    assert wrong <= 2


def test_over_the_adaptive_attack_no_innocent_is_accused() -> None:
    wrong = [accused(rounds_of(seed, "adaptive")) - LIARS for seed in range(2)]
    assert not any(wrong)


def test_who_lies_grossly_is_accused_and_nobody_else() -> None:
    for alike in (False, True):
        assert accused(rounds_of(1, "reverse-scaled-average", alike)) == LIARS
    assert accused(rounds_of(1, "sign-flip", alike=True)) == LIARS


def test_where_nobody_stands_out_nothing_can_be_said() -> None:
    found = verdict(rounds_of(3))
    assert found["clients"] == [] and found["said"].startswith("nothing can be said")


def test_the_probability_is_that_of_the_largest_of_all_whatever_the_number() -> None:
    """Under its own null, normal means, a run accuses somebody in `LEVEL` of all cases at most."""
    generator = np.random.default_rng(0)
    for count in (8, 30):
        wrong = 0
        for _ in range(400):
            means = generator.standard_normal((count, len(SCORES)))
            p = p_values({client: [row.tolist()] * 5 for client, row in enumerate(means)})
            wrong += min(p.values()) <= LEVEL
        assert wrong <= 12  # 4 expected at most


def test_few_clients_or_rounds_convict_nobody() -> None:
    scores = rounds_of(1, "reverse-scaled-average")
    few = {client: scores[client] for client in list(scores)[-6:]}
    assert set(p_values(few).values()) == {1.0}
    assert p_values({client: rows[:4] for client, rows in scores.items()}) == {}
    assert "nothing can be said: 0 clients" in verdict({})["said"]


def test_updates_that_are_all_alike_have_no_scores_worth_a_word() -> None:
    assert not round_scores(torch.ones(9, 4)).any()
    assert min(p_values({client: [[0.0] * 3] * 6 for client in range(9)}).values()) == 1.0
