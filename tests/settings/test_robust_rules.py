"""The robust rules by configuration: each name does what its function does, or is refused."""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_runs import configuration, run
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.randomness import Stream, generator_of
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.run_folder import read_metrics
from blackthorn.server_app.build import build_strategy
from blackthorn.settings.catalogue import GUARANTEES
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.settings.robustness_checks import assumed_corrupt
from blackthorn.strategies import (
    Buckets,
    CorruptionBound,
    Rage,
    RageFilter,
    RobustRule,
    aggregation,
)
from blackthorn.strategies.aggregation import RoundOfRule, nearest_neighbours
from blackthorn.strategies.reports import RoundReport

RULES = ("mean", *GUARANTEES)
PRE_AGGREGATORS = (
    "none",
    "nearest-neighbour-mixing",
    "bucketing",
    "adaptive-clipping",
    "equal-lengths",
)
# Of these rows, of which one lies far away, the first three leave out the same as RAGE; and of 15
# weights two are gone after one step, so that CAF has no other mean to choose than the first.
SAME_HERE = {"mda", "monna", "smea", "caf"}
# 15 clients are 8 buckets of two: the last has one, so that even the mean of the means differs.
COHORT = {"num_clients": 15, "num_corrupt": 1, "num_server_rounds": 1, "local_steps": 2}
ATTACKER = {"num_byzantine": 1, "attack": "sign-flip"}


def function_of(rule: str) -> Any:
    return aggregation.get("coordinate-median" if rule == "median" else rule)


def one_round(folder: Path, **options: Any) -> RoundReport:
    reports: list[RoundReport] = []
    run(folder, [reports.append], **{**COHORT, **ATTACKER, **options})
    assert reports[-1].skipped is None
    return reports[-1]


def mixed_by_hand(updates: torch.Tensor, how: str) -> np.ndarray:
    """The rows a rule sees, from the definitions, float64."""
    rows = updates.double().numpy()
    if how == "nearest-neighbour-mixing":
        distances = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
        return np.stack([rows[np.argsort(d, kind="stable")[:-1]].mean(axis=0) for d in distances])
    if how == "bucketing":
        order = generator_of(Stream.RULE, 0, 1).permutation(len(rows))
        return np.stack([rows[order[i : i + 2]].mean(axis=0) for i in range(0, len(rows), 2)])
    if how == "adaptive-clipping":
        norms = np.linalg.norm(rows, axis=1)
        kept = len(rows) - int(2 * 1 / len(rows) * (len(rows) - 1))
        return rows * np.minimum(1, np.sort(norms)[kept - 1] / norms)[:, None]
    if how == "equal-lengths":
        norms = np.linalg.norm(rows, axis=1)
        return rows / norms[:, None] * np.median(norms)
    return rows


Rounds = Callable[[str, str], RoundReport]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    """A round of a rule after a pre-aggregator, through `simulate`, once for all who ask for it."""

    @cache
    def of(rule: str, pre: str) -> RoundReport:
        folder = tmp_path_factory.mktemp("run")
        return one_round(folder, aggregator=rule, pre_aggregator=pre, bucket_size=2)

    return of


@pytest.mark.parametrize("pre", PRE_AGGREGATORS)
@pytest.mark.parametrize("rule", RULES)
def test_the_name_stands_for_the_function(rounds: Rounds, rule: str, pre: str) -> None:
    report = rounds(rule, pre)
    assert report.updates is not None and report.aggregate is not None
    rows = torch.from_numpy(mixed_by_hand(report.updates, pre)).float()
    expected = function_of(rule)(rows, 1).vector
    torch.testing.assert_close(report.aggregate, expected, rtol=1e-4, atol=1e-6)


def test_every_rule_and_every_mixing_gives_a_model_of_its_own(
    rounds: Rounds,
) -> None:
    rules = [rounds(rule, "none") for rule in RULES if rule not in SAME_HERE]
    mixings = [rounds("mean", pre) for pre in PRE_AGGREGATORS]
    for group in (rules, mixings):
        for a, b in itertools.combinations(group, 2):
            assert a.updates is not None and b.updates is not None
            assert torch.equal(a.updates, b.updates)
            assert (a.model - b.model).norm() > 1e-4 * a.model.norm()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"algorithm": "gfedavg"},
        {"algorithm": "fat-clipping-pr", "clip_norm": 0.5},
        {"algorithm": "fat-clipping-pi", "clip_norm": 0.5},
        {"algorithm": "ce-fedavg", "clip_norm": 0.05},
        {"algorithm": "rage"},
    ],
    ids=lambda values: values["algorithm"],
)
def test_every_algorithm_takes_every_rule(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    models = {
        (rule, pre): one_round(
            tmp_path / rule / pre, aggregator=rule, pre_aggregator=pre, **algorithm
        ).model
        # Adaptive clipping may leave what Krum chooses, and updates of one length, as they are.
        for rule, pre in itertools.product(("auto", "krum", "median"), PRE_AGGREGATORS[:3])
    }
    for one, other in itertools.combinations(models, 2):
        assert not torch.allclose(models[one], models[other], rtol=1e-3, atol=1e-7), (one, other)


def test_the_keys_of_a_rule_reach_it(tmp_path: Path) -> None:
    def model(name: str, **options: Any) -> torch.Tensor:
        report = one_round(tmp_path / name, **options)
        assert report.aggregate is not None and report.updates is not None
        return report.aggregate

    updates = one_round(tmp_path / "plain").updates
    for selected in (1, 3):
        got = model(f"m{selected}", aggregator="multi-krum", krum_selected=selected)
        expected = aggregation.multi_krum(updates, 1, num_selected=selected).vector
        assert torch.equal(got, expected)
    got = model(
        "cc",
        aggregator="centered-clipping",
        centered_clipping_radius=0.25,
        centered_clipping_iterations=7,
    )
    assert torch.equal(
        got, aggregation.centered_clipping(updates, 1, radius=0.25, iterations=7).vector
    )
    assert not torch.equal(got, aggregation.centered_clipping(updates, 1).vector)
    pairs, fives = (
        model(f"b{size}", aggregator="median", pre_aggregator="bucketing", bucket_size=size)
        for size in (2, 5)
    )
    assert not torch.allclose(pairs, fives)


# What is refused.


@pytest.mark.parametrize("rule", GUARANTEES)
def test_the_table_of_guarantees_is_what_the_rules_refuse(rule: str) -> None:
    for rows in range(1, 31):
        most = GUARANTEES[rule].most(rows)
        updates = np.random.default_rng(rows).standard_normal((rows, 2))
        if most >= 0:
            function_of(rule)(updates, most)
        with pytest.raises(ValueError, match="num_corrupt"):
            function_of(rule)(updates, max(most, -1) + 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"aggregator": "median", "num-corrupt": 5}, "num-corrupt = 5 .*fewer than half.*most 4"),
        ({"aggregator": "trimmed-mean", "num-corrupt": 5}, "aggregator = trimmed-mean.*most 4"),
        ({"aggregator": "geometric-median", "num-corrupt": 5}, "most 4"),
        ({"aggregator": "centered-clipping", "num-corrupt": 5}, "most 4"),
        ({"aggregator": "krum", "num-corrupt": 4}, "num-corrupt = 4 .*aggregator = krum.*most 3"),
        ({"aggregator": "multi-krum", "num-corrupt": 4}, "most 3"),
        ({"aggregator": "bulyan", "num-corrupt": 2}, "fewer than a quarter.*most 1"),
        ({"aggregator": "rage", "num-corrupt": 4}, "fewer than a third.*most 3"),
        ({"algorithm": "rage", "num-corrupt": 4}, "aggregator = rage.*most 3"),
        ({"algorithm": "rage", "rage-stop": "spectral"}, "rage-variance = 0.0 .*greater than 0"),
        (
            {"aggregator": "rage", "rage-stop": "spectral", "rage-variance": 1.0,
             "rage-constant": 10.9},
            "rage-constant = 10.9",
        ),
        ({"aggregator": "krum", "num-clients": 2}, "too few for this rule"),
        ({"aggregator": "median", "corrupt-fraction": 0.5}, "corrupt-fraction = 0.5 .*below 0.5"),
        ({"aggregator": "bulyan", "corrupt-fraction": 0.25}, "below 0.25"),
        (
            {"aggregator": "krum", "corrupt-fraction": 0.4},
            r"corrupt-fraction = 0.4 \(4 of 10\) .*at most 3",
        ),
        (
            {"aggregator": "krum", "num-corrupt": 3, "participation": "fixed",
             "clients-per-round": 8},
            "8 clients in a round corrupt .at most 2",
        ),
        (
            {"aggregator": "median", "num-corrupt": 3, "pre-aggregator": "bucketing"},
            "5 buckets of 10 clients corrupt .at most 2",
        ),
        ({"pre-aggregator": "nearest-neighbour-mixing", "aggregator": "mean", "num-corrupt": 5},
         "most 4"),
        ({"pre-aggregator": "bucketing", "bucket-size": 11}, "bucket-size = 11.*at most the 10"),
        ({"aggregator": "multi-krum", "num-corrupt": 2, "krum-selected": 9},
         "krum-selected = 9.*at most 8"),
        ({"aggregator": "median", "weighting": "num-examples"}, "weighting = num-examples"),
        ({"pre-aggregator": "bucketing", "weighting": "num-examples"}, "weighting = num-examples"),
        ({"centered-clipping-radius": -1.0}, "centered-clipping-radius = -1.0"),
        ({"centered-clipping-iterations": 0}, "centered-clipping-iterations = 0"),
        ({"bucket-size": 0}, "bucket-size = 0"),
        ({"aggregator": "coordinate-median"}, "aggregator = 'coordinate-median' is not allowed"),
    ],
)  # fmt: skip
def test_what_no_guarantee_covers_is_one_line(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        make_config(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"aggregator": "median", "corrupt-fraction": 0.4},
        {"aggregator": "krum", "num-corrupt": 3},
        {"aggregator": "bulyan", "num-corrupt": 1},
        {"aggregator": "rage", "num-corrupt": 1, "pre-aggregator": "bucketing"},
        {"aggregator": "mean", "corrupt-fraction": 0.4},  # to compare with what stands that
        {"num-clients": 1},
        {"num-clients": 1, "algorithm": "rage"},
        {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 1.0,
         "claim-privacy": False, "aggregator": "krum", "pre-aggregator": "bucketing"},
    ],
)  # fmt: skip
def test_what_a_guarantee_covers_is_built(values: dict[str, Any]) -> None:
    build_strategy(make_config(values))


@pytest.mark.parametrize(
    "values", [{"aggregator": "median"}, {"pre-aggregator": "nearest-neighbour-mixing"}]
)
def test_a_robust_rule_breaks_a_privacy_claim(values: dict[str, Any]) -> None:
    private = {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 1.0}
    with pytest.raises(ConfigError, match="breaks the claim: the sensitivity of a robust rule"):
        make_config({**private, **values})


def test_the_fraction_is_counted_as_the_strategies_count_it() -> None:
    for fraction in (0.0, 0.05, 0.1, 0.125, 0.29, 0.3, 0.33):
        config = make_config({"corrupt-fraction": fraction, "num-clients": 1000})
        bound = CorruptionBound(fraction=fraction)
        for cohort in range(1, 301):
            assert assumed_corrupt(config, cohort) == bound.among(cohort)


def test_a_round_with_too_few_replies_for_the_rule_is_skipped_with_the_reason(
    tmp_path: Path,
) -> None:
    """Nine clients are enough for b = 3, the six that answer are not."""
    options = {"num_clients": 9, "num_corrupt": 3, "num_byzantine": 3, "attack": "slow"}
    config = configuration(tmp_path, aggregator="krum", **options)
    with pytest.raises(RunFailed, match="krum needs K >= 2 num_corrupt"):
        simulate(config, Console(quiet=True))
    entries = read_metrics(tmp_path)[1:]
    assert len(entries) == 3
    for entry in entries:
        assert (
            "krum needs K >= 2 num_corrupt + 3: got num_corrupt = 3 with K = 6" in entry["skipped"]
        )


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({"aggregator": "rage"}, True),
        ({"algorithm": "rage"}, True),
        ({"aggregator": "trimmed-mean", "corrupt-fraction": 0.09}, True),
        ({"aggregator": "trimmed-mean", "corrupt-fraction": 0.1}, False),
        ({"aggregator": "rage", "num-corrupt": 0}, False),  # as it was asked for
        ({"aggregator": "rage", "rage-stop": "spectral", "rage-variance": 1.0}, False),
        ({"aggregator": "median"}, False),  # protects whatever b is
        ({}, False),
    ],
)
def test_a_rule_that_is_the_mean_says_so(
    values: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "blackthorn"):
        build_strategy(make_config(values))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == int(warned)
    assert all("which is the plain mean: set num-corrupt" in line for line in lines)


def largest_eigenvalue(rows: np.ndarray, weights: np.ndarray) -> float:
    """λ_max(Σ w̄ (u − μ)(u − μ)ᵀ)."""
    shares = weights / weights.sum()
    away = rows - shares @ rows
    return float(np.linalg.eigvalsh((shares[:, None] * away).T @ away)[-1])


def test_by_its_own_stop_rule_rage_is_not_told_how_many_lie(tmp_path: Path) -> None:
    """σ0² alone says when honest updates are left: from above C σ0² = 2.2 to at most that."""
    options: dict[str, Any] = {
        "algorithm": "rage",
        "rage_stop": "spectral",
        "rage_variance": 0.2,
        "num_corrupt": 0,
        "num_clients": 10,
        "num_byzantine": 3,
        "attack": "gradient-shift",
        "partition": "iid",
        "examples_per_client": 0,
        "num_server_rounds": 2,
        "instruments": False,
    }
    reports: list[RoundReport] = []
    run(tmp_path / "own", [reports.append], **options)
    for report in reports[1:]:
        assert report.updates is not None
        assert report.weights is not None
        rows, weights = report.updates.double().numpy(), report.weights.numpy()
        assert largest_eigenvalue(rows, np.ones(10)) > 2.2
        assert largest_eigenvalue(rows, weights) <= 2.2
        assert report.filtered == [7, 8, 9]
    # C is the recipe's, too: 10^7 σ0² is beyond what the liars make of the covariance.
    run(tmp_path / "wide", [reports.append], **options, rage_constant=1e7)
    assert reports[-1].filtered == []
    assert reports[-1].iterations == 0


# The same for whoever composes a strategy in Python.
AT = RoundOfRule(1, 0.1, torch.zeros(8), np.random.default_rng(0))


def test_buckets_count_the_corrupt_among_the_clients() -> None:
    """3 of 30 corrupt are a tenth; of 10 buckets they may spoil 3, not floor(10 / 10)."""
    rng = np.random.default_rng(3)
    updates = torch.from_numpy(rng.standard_normal((30, 8)) + 1)
    updates[:3] = -1e6
    rule = RageFilter(CorruptionBound(fraction=0.1), mixing=Buckets(3))
    weights = torch.full((30,), 1 / 30, dtype=torch.float64)
    result = rule(updates, weights, AT)
    assert not result.survivors[:3].any()
    assert result.vector.abs().max() < 5


def test_fewer_updates_than_a_bucket_holds_are_one_bucket() -> None:
    rule = RobustRule("coordinate-median", CorruptionBound(0), mixing=Buckets(5))
    updates = torch.tensor([[1.0], [2.0], [6.0]])
    result = rule(updates, torch.full((3,), 1 / 3).double(), AT)
    assert result.vector.tolist() == [3.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buckets(0), "size = 0"),
        (lambda: RobustRule("medain", CorruptionBound(1)), "aggregator must be one of"),
        (lambda: Rage(1, stop="never"), "stop = 'never'"),  # type: ignore[arg-type]
        (lambda: Rage(1, stop="spectral"), "stop = 'spectral' needs sigma0_squared > 0"),
        (lambda: Rage(1, sigma0_squared=1.0), "only used by stop = 'spectral'"),
        (lambda: Rage(1, stop="spectral", sigma0_squared=1.0, spectral_constant=9), "at least 11"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_rage_takes_a_mixing() -> None:
    rule = Rage(1, mixing=nearest_neighbours)._aggregate
    assert isinstance(rule, RageFilter)
    assert rule.mixing is nearest_neighbours
