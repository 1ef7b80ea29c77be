"""What the papers' experiments conclude: right numbers reproduce, those of a wrong implementation
do not."""

import math
from typing import Any

import numpy as np
import pytest

from blackthorn.experiments import (
    byzantine_verdicts,
    catastrophes,
    clipping_cost,
    exact_distance,
    exact_verdicts,
    posterior_fashion,
    private_fashion,
    private_quadratic,
    sampled_distance,
    stationary_points,
    synthetic_noise,
    update_shapes,
    update_tails,
)
from blackthorn.experiments.clipping_runs import CLIPPED, FEDAVG, private_name
from blackthorn.experiments.finding import Claim, Finding, between
from blackthorn.experiments.study import Context, Scale, Value

FULL, QUICK = Scale(), Scale(quick=True)
BOTH = pytest.mark.parametrize("scale", [FULL, QUICK])


def all_agree(claims: list[Claim]) -> bool:
    return all(claim.agrees for claim in claims)


def differing(claims: list[Claim]) -> list[int]:
    return [i for i, claim in enumerate(claims) if not claim.agrees]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.0, 2.0, "1 to 2"), (-math.inf, 2.0, "below 2"), (1.0, math.inf, "above 1")],
)
def test_a_finding_holds_within_its_range_alone(low: float, high: float, expected: str) -> None:
    assert between("x", 1.5, low, high) == Finding("x", "1.5", expected, True)
    assert not between("x", math.nan, low, high).holds
    assert not between("x", 0.5 if low == 1.0 else 2.5, low, high).holds


# FAT-Clipping.


@BOTH
@pytest.mark.parametrize(
    ("method", "value", "claim"),
    [
        *(("PI 3", 0.25, 0), ("PR 30", 0.02, 1), ("PR 3", 1.9, 1), ("FedAvg", 4.9, 3)),
    ],
)
def test_under_cauchy_noise_a_method_out_of_place_changes_its_claim(
    scale: Scale, method: str, value: float, claim: int
) -> None:
    good = {
        "FedAvg": np.array([6.0, *[200.0] * 30]),
        "PR 3": np.full(31, 3.4),
        "PR 30": np.full(31, 0.2),
        "PI 3": np.full(31, 0.03),
        "BiClip 0.1 to 1": np.full(31, 0.01),
        "FedAvg, Gaussian": np.full(3, 0.01),
    }
    assert all_agree(synthetic_noise.cauchy_claims(good, scale))
    bad = {**good, method: np.array([*good[method][1:], value])}
    assert claim in differing(synthetic_noise.cauchy_claims(bad, scale))
    behind = {**good, "BiClip 0.1 to 1": np.full(31, 0.04)}
    assert differing(synthetic_noise.cauchy_claims(behind, scale)) == [4]
    # A method that does not clip at all.
    unclipped = {**good, "PI 3": good["FedAvg"], "PR 30": good["FedAvg"]}
    claims = synthetic_noise.cauchy_claims(unclipped, scale)
    assert [claim.verdict for claim in claims[:3]] == ["not", "partly", "not"]


def test_the_order_of_methods_must_follow_the_tail_index() -> None:
    def by_alpha(medians: list[float]) -> dict[tuple[str, float], np.ndarray]:
        return {
            (m, a): np.full(3, v)
            for m in synthetic_noise.ALPHA_METHODS
            for a, v in zip(synthetic_noise.ALPHAS, medians, strict=True)
        }

    falling = synthetic_noise.alpha_claims(by_alpha([2.0, 1.0, 0.5]))
    assert [claim.verdict for claim in falling] == ["not", "reproduced"]
    assert all_agree(falling)
    rising = synthetic_noise.alpha_claims(by_alpha([0.5, 1.0, 2.0]))
    assert [claim.verdict for claim in rising] == ["reproduced", "not"]
    assert differing(rising) == [0, 1]


def test_the_estimator_must_see_vectors_fat_and_norms_not() -> None:
    found = {a: {"vectors": [a], "norms": [min(1.0, 0.75 * a)]} for a in update_tails.ALPHAS}
    assert all_agree(update_tails.law_claims(found))
    wrong = {a: {"vectors": own["norms"], "norms": [a]} for a, own in found.items()}
    assert differing(update_tails.law_claims(wrong)) == [0, 1]


def test_the_index_of_norms_is_that_by_hand() -> None:
    assert update_tails.index_of_norms(np.full(100, 3.7)) == pytest.approx(1.0)
    # By hand: blocks (1, 3) and (2, 2) both sum to 4, so that the growth of the logarithms is
    # ln 4 − (ln 1 + ln 3 + 2 ln 2)/4.
    growth = math.log(4) - (math.log(3) + 2 * math.log(2)) / 4
    norms = np.array([1.0, 3.0, 2.0, 2.0])
    assert update_tails.index_of_norms(norms, 2) == pytest.approx(math.log(2) / growth)


def test_light_norms_and_fat_vectors_are_what_is_claimed() -> None:
    found = {
        (p, k): {"norms": [1.0, 1.0], "vectors": [1.8 + 0.02 * p, 1.79 + 0.02 * p]}
        for p in (2, 5, 10)
        for k in (1, 5)
    }
    assert all_agree(update_tails.update_claims(found))
    fat = {key: {"norms": [1.3], "vectors": [1.3 - 0.01 * key[0]]} for key in found}
    assert [claim.verdict for claim in update_tails.update_claims(fat)] == ["not"] * 3


def test_a_failure_is_a_fall_of_accuracy_with_a_spike() -> None:
    def own(failed: int | None, peak: float, first: float = 1.0) -> Value:
        accuracies = [0.1, 0.4, 0.6, 0.5, 0.5, 0.1]
        return {
            "accuracy": accuracies,
            "longest": [first, 1.0, 1.0, peak, 1.0],
            "failed": failed,
        }

    assert catastrophes.fall(own(5, 1.0)) == pytest.approx(50)
    assert catastrophes.fall(own(None, 1.0)) == 0
    assert catastrophes.spike(own(5, 5.0)) == 5.0
    claims = catastrophes.failure_claims([own(None, 1.0), own(5, 5.0)])
    assert [claim.verdict for claim in claims] == ["reproduced", "reproduced"]
    claims = catastrophes.failure_claims([own(None, 1.2), own(None, 1.0)])
    assert [claim.verdict for claim in claims] == ["not", "not"]
    # Long updates at the start are no spike.
    assert catastrophes.failure_claims([own(5, 1.0, first=9.0)])[1].verdict == "not"


def test_a_success_is_a_run_that_neither_failed_nor_fell() -> None:
    def trials(fedavg: int, pr: int, pi: int) -> dict[tuple[str, int], list[bool]]:
        names = zip(catastrophes.METHODS, (fedavg, pr, pi), strict=True)
        return {(name, p): [i < n for i in range(5)] for name, n in names for p in (2, 10)}

    assert all_agree(catastrophes.success_claims(trials(0, 2, 5), FULL))
    claims = catastrophes.success_claims(trials(0, 0, 0), FULL)
    assert [claim.verdict for claim in claims] == ["not", "not", "reproduced", "not significant"]
    assert differing(claims) == [0, 3]
    assert catastrophes.success_claims(trials(5, 3, 0), FULL)[3].verdict == "not"
    # Two trials more of five are no difference; a quick run goes by their number.
    assert catastrophes.success_claims(trials(3, 4, 5), FULL)[3].verdict == "not significant"
    assert catastrophes.success_claims(trials(3, 4, 5), QUICK)[3].verdict == "reproduced"
    ended = {"failed": None, "accuracy": [0.1, 0.8]}
    assert catastrophes.succeeded(ended)
    assert not catastrophes.succeeded({**ended, "failed": 3})
    assert not catastrophes.succeeded({**ended, "accuracy": [0.8, 0.4]})


# DP-NormFedAvg.


def quadratic_numbers(ratios: dict[float, float], snr: dict[float, float]) -> dict[Any, Value]:
    numbers: dict[Any, Value] = {}
    for bound, ratio in ratios.items():
        for method, end, signal in (
            ("clipping", ratio, 1.0),
            ("normalising", 1.0, snr[bound]),
        ):
            label = (method, bound, "I1", private_quadratic.RATE, 0)
            numbers[label] = {"suboptimality": [9.0, end], "ratio": [None, signal]}
    return numbers


@BOTH
def test_on_the_quadratic_normalising_must_be_better_by_as_much_as_claimed(scale: Scale) -> None:
    good, snr = {100.0: 1.78, 50.0: 1.06, 40.0: 1.0}, {100.0: 2.0, 50.0: 1.3, 40.0: 1.0}
    assert all_agree(private_quadratic.claims(quadratic_numbers(good, snr), scale))
    alike = dict.fromkeys(good, 1.0)
    claims = private_quadratic.claims(quadratic_numbers(alike, alike), scale)
    assert claims[0].verdict == "not"
    assert differing(claims)[:1] == [0]
    assert not private_quadratic.claims(quadratic_numbers({**good, 40.0: 1.3}, snr), scale)[
        1
    ].agrees
    swapped = dict.fromkeys(good, 0.5)
    assert private_quadratic.claims(quadratic_numbers(good, swapped), scale)[2].verdict == "not"


def fashion(gaps: dict[float, float], fedavg: float = 83.4, level: float = 81.0) -> dict[Any, Any]:
    figures: dict[Any, Any] = {("FedAvg",): np.full(3, fedavg)}
    for bound, gap in gaps.items():
        figures["clipping", 5.0, bound] = np.full(3, level)
        figures["normalising", 5.0, bound] = np.full(3, level + gap)
    return figures


@BOTH
def test_on_fashion_mnist_the_gain_must_fall_with_the_threshold(scale: Scale) -> None:
    good = {62.5: 2.5, 31.25: 1.1, 15.6: 0.0}
    assert all_agree(private_fashion.claims(fashion(good), scale))
    same = private_fashion.claims(fashion(dict.fromkeys(good, 0.0)), scale)
    assert same[1].verdict == "not"
    assert not private_fashion.claims(fashion({**good, 15.6: 2.0}), scale)[2].agrees
    assert not private_fashion.claims(fashion(good, fedavg=70.0), scale)[0].agrees
    # Had the noise been the paper's, its absolute numbers would come out.
    assert not private_fashion.claims(fashion({62.5: 2.1}, level=75.6), scale)[-1].agrees


def test_the_best_threshold_of_table_1() -> None:
    figures = fashion({62.5: 2.5, 31.25: 3.0})
    assert private_fashion.best(figures, "normalising", 5.0)[0] == 31.25


# Understanding clipping.


def curves(fedavg: float, clipped: float, private: float, models: float) -> dict[str, Any]:
    return {
        FEDAVG: [[10.0] * 30 + [fedavg]],
        CLIPPED: [[10.0] * 30 + [clipped]],
        **{private_name(e): [[10.0] * 30 + [private]] for e in clipping_cost.EPSILONS},
        clipping_cost.MODEL_CLIPPING: [[models] * 31],
    }


def test_the_cost_of_clipping_must_be_small_for_updates_and_large_for_models() -> None:
    assert all_agree(clipping_cost.full_claims(curves(90.8, 89.0, 88.6, 20.0)))
    assert all_agree(clipping_cost.quick_claims(curves(86.0, 80.0, 79.0, 20.0)))
    assert all_agree(clipping_cost.iid_claims(curves(86.0, 80.0, 79.0, 20.0)))
    # Clipping that does nothing to models, noise that is far too large, or a dead model.
    assert differing(clipping_cost.full_claims(curves(90.8, 89.0, 88.6, 88.0))) == [3]
    assert differing(clipping_cost.quick_claims(curves(86.0, 80.0, 79.0, 80.0))) == [3]
    assert differing(clipping_cost.quick_claims(curves(86.0, 80.0, 40.0, 20.0))) == [2]
    assert differing(clipping_cost.full_claims(curves(90.8, 40.0, 40.0, 20.0))) == [1, 2]
    assert differing(clipping_cost.full_claims(curves(97.0, 89.0, 88.6, 20.0))) == [0, 1]
    assert 0 in differing(clipping_cost.quick_claims(curves(50.0, 45.0, 44.0, 20.0)))


def test_stationary_points_off_the_table_do_not_reproduce() -> None:
    ends = {name: [end] * 3 for name, (_, end) in stationary_points.TABLE_4.items()}
    assert stationary_points.table_4_claim(ends).verdict == "reproduced"
    never_clipped = {**ends, "Q = 1, c = 1 (gradient units)": [0.0, 0.0, 0.0]}
    assert stationary_points.table_4_claim(never_clipped).verdict == "partly"
    # λ = 0.7³ and c = 2: 0.343 · 2 / (3 − 0.686).
    models = 0.686 / 2.314
    assert stationary_points.claim_2_1(models, 0.52).verdict == "reproduced"
    assert stationary_points.claim_2_1(8 / 3, models / 2).verdict == "not"


def test_updates_of_unlike_clients_must_spread_more() -> None:
    case = ("mnist", "mlp-32")
    keys = [(case, "IID"), (case, "Non-IID")]

    def by_split(*values: list[float]) -> dict[tuple[tuple[str, str], str], list[float]]:
        return dict(zip(keys, values, strict=True))

    claims = update_shapes.claims(by_split([0.5], [4.0]), by_split([0.05], [0.2]))
    assert [claim.verdict for claim in claims] == ["reproduced"] * 3
    claims = update_shapes.claims(by_split([4.0], [0.5]), by_split([0.3], [0.2]))
    assert [claim.verdict for claim in claims] == ["not", "not", "reproduced"]
    # One seed says so, the next the opposite.
    claims = update_shapes.claims(by_split([0.5, 4.0], [4.0, 0.6]), by_split([0.1] * 2, [0.2] * 2))
    assert claims[0].verdict == "not significant"


# FA-LD: the exact numbers are right, so what is wrong is put into them.


@pytest.fixture(scope="module")
def exact() -> dict[str, Value]:
    return {str(c.label[0]): c.work(c.settings, Context()) for c in exact_distance.cells(QUICK)}


def test_the_exact_distances_reproduce_every_claim(exact: dict[str, Value]) -> None:
    claims = exact_verdicts.section({(k, 0): v for k, v in exact.items()}, QUICK).claims
    assert [claim.verdict for claim in claims] == ["reproduced"] * 11


def test_wrong_distances_do_not_reproduce(exact: dict[str, Value]) -> None:
    flat = {"eta": exact["step size"]["eta"], "w2": {"1": [0.1] * 10, "10": [0.1] * 10}}
    assert [c.verdict for c in exact_verdicts.step_size_claims(flat)] == ["not", "not"]
    assert exact_verdicts.local_steps_claim({"w2": [0.1] * 6}).verdict == "not"
    assert exact_verdicts.heterogeneity_claim({"w2": [[0.1]] * 5}).verdict == "not"
    stuck = {**exact["decaying"], "decaying": exact["decaying"]["fixed"]}
    assert not exact_verdicts.decaying_claim(stuck).agrees
    noise = {"w2": [0.1, 0.1, 0.1, 0.1, 0.1, 0.2], "alike": [0.1, 0.2]}
    assert [c.verdict for c in exact_verdicts.shared_noise_claims(noise)] == ["not", "not"]
    # 1/√p_c applied twice: the bias of partial participation is several times what it should be.
    wrong = dict(exact["participants"])
    wrong["w2"] = {key: [3 * v for v in curve] for key, curve in wrong["w2"].items()}
    assert [c.verdict for c in exact_verdicts.participants_claims(wrong)][2] == "not"


@BOTH
def test_sampled_distances_must_be_near_the_exact_ones(scale: Scale) -> None:
    exact_ones = (0.16, 0.04, 0.01, 0.35, 0.6)
    names = list(sampled_distance.VARIATIONS)

    def found(sampled: tuple[float, ...]) -> dict[str, dict[str, list[float]]]:
        pairs = zip(names, sampled, exact_ones, strict=True)
        return {name: {"sampled": [s], "exact": [e]} for name, s, e in pairs}

    assert all_agree(sampled_distance.claims(found((0.17, 0.06, 0.03, 0.36, 0.58)), scale))
    # Noise without its factor √2.
    wrong = sampled_distance.claims(found((0.4, 0.35, 0.3, 0.2, 0.25)), scale)
    assert differing(wrong) == [0, 1]


@pytest.mark.parametrize(
    ("nll", "ece", "differs"),
    [
        ((0.5, 0.6, 0.7), (0.1, 0.2, 0.3), []),
        ((0.5, 0.4, 0.7), (0.1, 0.2, 0.3), [0]),
        ((0.5, 0.6, 0.7), (0.1, 0.2, 0.05), [1]),
    ],
)
def test_the_posterior_s_mean_must_have_the_better_scores(
    nll: tuple[float, float, float], ece: tuple[float, float, float], differs: list[int]
) -> None:
    figures = {
        name: {"nll": np.array([nll[i], 0.1 + nll[i]]), "ece": np.array([ece[i], 0.1 + ece[i]])}
        for i, name in enumerate(posterior_fashion.SYSTEMS)
    }
    assert differing(posterior_fashion.claims(figures)) == differs


# RAGE.

REMOVED = {"A.1": 40.0, "A.2": 0.0, "A.3": 100.0, "A.4": 100.0, "A.5": 0.0, "A.6": 100.0}


def usual(attack: str) -> dict[str, float]:
    """The middle of what is expected of every rule."""
    rules = byzantine_verdicts.EXPECTED[attack]
    ranges = {rule: byzantine_verdicts.expected_range(attack, rule) for rule in rules}
    return {rule: (low + high) / 2 for rule, (low, high) in ranges.items()}


@BOTH
@pytest.mark.parametrize("attack", sorted(REMOVED))
def test_a_defence_that_falls_back_to_another_rule_shows(scale: Scale, attack: str) -> None:
    none = {rule: [value] for rule, value in usual("none").items()}
    good = {rule: [value] for rule, value in usual(attack).items()}
    claims = byzantine_verdicts.claims(attack, good, none, [REMOVED[attack]], scale)
    assert all_agree(claims)
    # A defence that silently falls back to something else, and removes the wrong clients.
    bad = {**good, "rage": [15.0]}
    wrong = 100.0 if REMOVED[attack] < 50 else 0.0
    claims = byzantine_verdicts.claims(attack, bad, none, [wrong], scale)
    told_apart = scale is FULL or attack in ("A.3", "A.4", "A.6")
    assert ({0, 2} if told_apart else {0}) <= set(differing(claims))
    assert claims[1].verdict == "not"


@BOTH
def test_the_table_shows_attacks_that_harm_nobody_or_a_rule_that_harms(scale: Scale) -> None:
    expected = {
        attack: {rule: [value] for rule, value in usual(attack).items()}
        for attack in byzantine_verdicts.EXPECTED
    }
    assert all_agree(byzantine_verdicts.table_claims(expected, scale))
    harmless = {attack: dict(expected["none"]) for attack in expected}
    assert differing(byzantine_verdicts.table_claims(harmless, scale)) == [0]
    harmful = {**expected, "none": {"mean": [84.8], "rage": [60.0]}}
    assert 1 in differing(byzantine_verdicts.table_claims(harmful, scale))


def test_a_figure_that_the_draw_moves_is_held_by_its_mean_over_the_draws() -> None:
    """The range of A.6's median is 50.6 to 63.8: draws beyond it count where their mean does."""
    none = {rule: [value] * 5 for rule, value in usual("none").items()}
    good = {rule: [value] * 5 for rule, value in usual("A.6").items()}

    def levels(median: list[float]) -> Claim:
        accuracies = {**good, "median": median}
        return byzantine_verdicts.claims("A.6", accuracies, none, [100.0] * 5, FULL)[3]

    assert levels([49.0, 55.0, 58.0, 60.0, 66.0]).verdict == "reproduced"
    assert levels([64.0, 66.0, 66.5, 67.0, 68.0]).verdict == "partly"
    # Outside by less than the draws' own spread.
    assert levels([55.0, 60.0, 65.0, 70.0, 75.0]).verdict == "not significant"
