"""Which iterate a run hands out: the law of the random ones, and that the run obeys."""

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_runs import PRIVATE, configuration, model, run, summary_of
from flwr.app import Array, ArrayRecord
from safetensors.numpy import load_file
from scipy.stats import chisquare

from blackthorn.server_app.run import prepare
from blackthorn.settings.catalogue import ALGORITHMS
from blackthorn.settings.config import ConfigError
from blackthorn.strategies.judging import Judge
from blackthorn.strategies.output_iterate import IterateKeeper, OutputIterate
from blackthorn.tasks.problem import load_problem


def exact_weights(contraction: Fraction, num_rounds: int) -> list[Fraction]:
    """(1 - c)^{1-t} over its sum, t = 1..T, in rational arithmetic."""
    raw = [(1 - contraction) ** (1 - t) for t in range(1, num_rounds + 1)]
    return [weight / sum(raw) for weight in raw]


def drawn(output: OutputIterate, num_rounds: int, seed: int) -> int:
    """The round that a random rule draws."""
    found = output.draw(num_rounds, seed)
    assert found is not None
    return found


# The law.


@pytest.mark.parametrize(
    "contraction", [Fraction(1, 4), Fraction(1, 2), Fraction(1, 1024), Fraction(15, 16)]
)
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 12])
def test_weights_are_exactly_those_of_the_theorem(contraction: Fraction, num_rounds: int) -> None:
    found = OutputIterate("random-weighted", float(contraction)).weights(num_rounds)
    expected = [float(weight) for weight in exact_weights(contraction, num_rounds)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_uniform_weights_are_all_alike() -> None:
    np.testing.assert_allclose(OutputIterate("uniform").weights(4), [0.25] * 4)


def test_a_million_rounds_do_not_overflow() -> None:
    weights = OutputIterate("random-weighted", 0.5).weights(10**6)
    assert np.isfinite(weights).all()
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    # The geometric law's end: 1/2, 1/4, ... backwards.
    np.testing.assert_allclose(weights[::-1][:20], 0.5 ** np.arange(1, 21), rtol=1e-12)
    assert 10**6 - 60 < drawn(OutputIterate("random-weighted", 0.5), 10**6, 3) <= 10**6


@pytest.mark.parametrize("contraction", [1e-15, 1 - 1e-15])
def test_the_weights_of_extreme_contractions_are_finite_and_sum_to_1(contraction: float) -> None:
    weights = OutputIterate("random-weighted", contraction).weights(1000)
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    assert weights[-1] == pytest.approx(1 / 1000 if contraction < 0.5 else 1.0, rel=1e-9)


@pytest.mark.parametrize(
    ("output", "law"),
    [
        (OutputIterate("uniform"), [Fraction(1, 5)] * 5),
        (OutputIterate("random-weighted", 0.25), exact_weights(Fraction(1, 4), 5)),
    ],
)
def test_draws_follow_the_law(output: OutputIterate, law: list[Fraction]) -> None:
    draws = Counter(output.draw(5, seed) for seed in range(4000))
    assert set(draws) == {1, 2, 3, 4, 5}
    expected = [4000 * float(weight) for weight in law]
    assert chisquare([draws[t] for t in range(1, 6)], expected).pvalue > 1e-3


def test_a_draw_is_the_seeds_own() -> None:
    output = OutputIterate("uniform")
    assert [output.draw(1000, 5) for _ in range(3)] == [output.draw(1000, 5)] * 3
    assert output.draw(1000, 5) != output.draw(1000, 6)


@pytest.mark.parametrize("rule", ["last", "best", "uniform-average", "weighted-average"])
def test_nothing_is_drawn_for_the_other_rules(rule: Any) -> None:
    assert OutputIterate(rule, 0.5).draw(10, 0) is None


@pytest.mark.parametrize("contraction", [0.0, 1.0, -0.5, math.nan, 2.0])
def test_contractions_that_are_refused(contraction: float) -> None:
    with pytest.raises(ValueError, match="greater than 0 and less than 1"):
        OutputIterate("random-weighted", contraction)


# Keeping it.


def keep(output: OutputIterate, seed: int, evaluations: list[dict[str, float]]) -> int:
    """The round of the iterate kept of a run with these evaluations, after rounds 0, 1, ..."""
    keeper = IterateKeeper(output, len(evaluations) - 1, seed)
    records = [ArrayRecord({"w": Array(np.array([float(t)]))}) for t in range(len(evaluations))]
    for t, metrics in enumerate(evaluations):
        keeper.see(t, records[t], metrics)
    assert float(keeper.arrays["w"].numpy()[0]) == keeper.server_round
    return keeper.server_round


def accuracies(*values: float | None) -> list[dict[str, float]]:
    return [{} if value is None else {"accuracy": value, "loss": -value} for value in values]


@pytest.mark.parametrize("seed", range(8))
def test_w_t_is_the_model_with_which_round_t_begins(seed: int) -> None:
    output = OutputIterate("uniform")
    assert keep(output, seed, accuracies(*[0.5] * 7)) == drawn(output, 6, seed) - 1


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        (accuracies(0.1, 0.5, 0.9, 0.7), 2),
        (accuracies(0.1, 0.9, 0.9, 0.7), 1),  # the first of equals
        (accuracies(0.8, 0.5, 0.6), 0),
        (accuracies(0.1, None, 0.3, None), 2),  # unevaluated rounds do not count
        (accuracies(None, None, None), 2),  # nothing is known: the last
        ([{}, {"loss": 2.0}, {"loss": 0.5}, {"loss": 0.7}], 2),
        ([{"loss": 2.0}, {"loss": math.nan}, {"loss": math.inf}, {"loss": 1.0}], 3),
        ([{"loss": math.nan}, {"loss": 3.0}, {"loss": 4.0}], 1),
        # The accuracy decides where there is one, whatever the loss.
        ([{"accuracy": 0.5, "loss": 0.1}, {"accuracy": 0.6, "loss": 9.0}], 1),
    ],
)
def test_best_keeps_the_iterate_of_the_best_evaluation(
    evaluations: list[dict[str, float]], expected: int
) -> None:
    assert keep(OutputIterate("best"), 0, evaluations) == expected


def test_last_keeps_the_last_iterate_whatever_it_is_worth() -> None:
    assert keep(OutputIterate(), 0, accuracies(0.9, 0.5, 0.1)) == 2


def test_a_higher_accuracy_or_else_a_lower_loss_is_better() -> None:
    is_better = Judge().prefers
    assert is_better({"accuracy": 0.5}, None)
    assert not is_better({"accuracy": 0.5}, {"accuracy": 0.5})
    assert not is_better({}, None)
    assert is_better({"loss": 0.5}, {"loss": math.nan})


def test_or_what_a_run_is_judged_by() -> None:
    assert Judge("r2").prefers({"r2": 0.5, "loss": 9.0}, {"r2": 0.4, "loss": 1.0})
    assert Judge("rmse", higher=False).prefers({"rmse": 1.0}, {"rmse": 2.0})
    assert not Judge("rmse", higher=False).prefers({"r2": 1.0}, None)


# In a run.


def initial(folder: Path, **options: Any) -> np.ndarray:
    state = prepare(configuration(folder, **options)).problem.state()
    return np.concatenate([state[key].numpy().ravel() for key in sorted(state, reverse=True)])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"output_iterate": "uniform"}, OutputIterate("uniform")),
        (
            # mu eta_g eta_l K / 2 = 0.4 * 1 * 0.5 * 4 / 2.
            {"output_iterate": "random-weighted", "strong_convexity": 0.4, "local_lr": 0.5},
            OutputIterate("random-weighted", 0.4),
        ),
    ],
)
def test_a_run_hands_out_the_drawn_iterate(
    tmp_path: Path, seed: int, options: dict[str, Any], output: OutputIterate
) -> None:
    rounds: dict[str, Any] = {"num_server_rounds": 4, "checkpoint_every": 1, "instruments": False}
    entries = run(tmp_path, seed=seed, **rounds, **options)
    summary = summary_of(tmp_path)
    expected = drawn(output, 4, seed) - 1
    assert summary["output_round"] == expected
    assert summary["rounds_completed"] == 4
    start = initial(tmp_path / "other", seed=seed)
    iterates = [start, *(model(tmp_path, f"round-{t:05d}") for t in range(1, 5))]
    assert len({iterate.tobytes() for iterate in iterates}) == 5
    np.testing.assert_array_equal(model(tmp_path), iterates[expected])
    if expected > 0:
        assert summary["final"]["accuracy"] == entries[expected - 1]["accuracy"]


AVERAGES = [
    OutputIterate("uniform-average"),
    OutputIterate("weighted-average", 0.4),
    OutputIterate("weighted-average", 1e-12),
    OutputIterate("weighted-average", 0.999),
]


@pytest.mark.parametrize("output", AVERAGES)
def test_an_average_is_the_mean_of_the_random_one(output: OutputIterate) -> None:
    """Σ_t weight_t w_t, w_1 the initial model and w_{T+1} left out, at every T."""
    values = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    for num_rounds in range(1, 8):
        keeper = IterateKeeper(output, num_rounds, 0)
        for t in range(num_rounds + 1):
            record = {"w": Array(values[t]), "count": Array(np.array(t))}
            keeper.see(t, ArrayRecord(record), {})
        expected = output.weights(num_rounds) @ values[:num_rounds].astype(np.float64)
        found = keeper.arrays
        np.testing.assert_allclose(found["w"].numpy(), expected, rtol=3e-7, atol=1e-7)
        assert found["w"].numpy().dtype == np.float32
        assert found["count"].numpy() == num_rounds - 1
        assert keeper.server_round == num_rounds - 1


def test_the_sum_of_many_float32_iterates_loses_nothing() -> None:
    keeper = IterateKeeper(OutputIterate("uniform-average"), 20_000, 0)
    for t in range(20_000):
        keeper.see(t, ArrayRecord({"w": Array(np.array([t % 3], dtype=np.float32))}), {})
    assert float(keeper.arrays["w"].numpy()[0]) == np.float32(19_999 / 20_000)


_EXTRA: dict[str, dict[str, Any]] = {
    "fa-ld": {"local_lr": 1e-4},
    "fsgld": {"local_lr": 1e-4, "algorithm_options": 'surrogate = "none"'},
    "sghmc": {"local_lr": 1e-4},
    "psgld": {"local_lr": 1e-4, "algorithm_options": "warm-up = 1", "burn_in": 1},
    "dp-fedavg": PRIVATE,
    "dp-normfedavg": {**PRIVATE, "algorithm": "dp-normfedavg"},
    "secure-dp-fedavg": {
        **PRIVATE,
        "algorithm": "secure-dp-fedavg",
        "participation": "full",
        "sample_rate": 1.0,
    },
    "rage": {"num_corrupt": 1},
    "biclip": {"algorithm_options": "low = 0.01, high = 1.0"},
}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("rule", ["uniform", "uniform-average", "weighted-average"])
def test_every_algorithm_hands_out_what_its_paper_s_box_does(
    tmp_path: Path, algorithm: str, rule: Any
) -> None:
    needs = ALGORITHMS[algorithm].clip_norm == "needed"
    options: dict[str, Any] = {"algorithm": algorithm, "instruments": False, "num_server_rounds": 3}
    options |= {"clip_norm": 1.0} if needs else {}
    options |= _EXTRA.get(algorithm, {})
    if rule == "weighted-average":
        # mu eta_g eta_l K / 2 = 0.4, whatever the rate.
        options["strong_convexity"] = 0.2 / float(options.get("local_lr", 0.1))
    seen: list[np.ndarray] = []
    run(tmp_path, [lambda r: seen.append(r.model.double().numpy())], output_iterate=rule, **options)
    iterates = np.array(seen)
    assert len(iterates) == 4 and not np.array_equal(iterates[0], iterates[3])
    found = final(tmp_path)
    if rule == "uniform":
        expected = iterates[drawn(OutputIterate("uniform"), 3, 0) - 1]
    else:
        expected = OutputIterate(rule, 0.4).weights(3) @ iterates[:3]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def final(folder: Path) -> np.ndarray:
    """The final model as the strategy's vector: in the order of the state_dict."""
    problem = load_problem(configuration(folder))
    state = load_file(folder / "checkpoints" / "final.safetensors")
    return np.concatenate([state[name].ravel() for name in problem.state()]).astype(np.float64)


def test_a_run_hands_out_the_best(tmp_path: Path) -> None:
    # At this rate the accuracy goes up and down.
    entries = run(
        tmp_path, output_iterate="best", local_lr=3.0, num_server_rounds=6, checkpoint_every=1
    )
    seen = [entry["accuracy"] for entry in entries]
    best = 1 + int(np.argmax(seen))
    assert best < 6, "the last is the best: nothing is tested"
    summary = summary_of(tmp_path)
    assert summary["output_round"] == best
    assert summary["final"]["accuracy"] == max(seen)
    np.testing.assert_array_equal(model(tmp_path), model(tmp_path, f"round-{best:05d}"))


def test_the_last_is_the_default(tmp_path: Path) -> None:
    run(tmp_path, num_server_rounds=2, checkpoint_every=1, instruments=False)
    assert summary_of(tmp_path)["output_round"] == 2
    np.testing.assert_array_equal(model(tmp_path), model(tmp_path, "round-00002"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strong_convexity": 0.0, "local_lr": 0.5},
        {"strong_convexity": 1.0, "local_lr": 0.5},  # a contraction of 1
    ],
)
@pytest.mark.parametrize("rule", ["random-weighted", "weighted-average"])
def test_a_run_without_weights_is_refused(
    tmp_path: Path, rule: str, options: dict[str, float]
) -> None:
    with pytest.raises(ConfigError, match=f"output-iterate = {rule} is not allowed"):
        configuration(tmp_path, output_iterate=rule, **options)
