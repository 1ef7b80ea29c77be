"""FA-LD's experiments: the exact recursion beside an enumeration, and what is compared."""

from pathlib import Path

import numpy as np
import pytest
from linear_law import Cohort, draw_data, expected_map, next_moments, with_replacement
from linear_law import full as full_cohort
from linear_law import stationary as enumerated_stationary
from linear_law import without_replacement as subsets

from blackthorn.experiments import posterior_fashion, sampled_distance
from blackthorn.experiments.gaussian_chain import (
    Participation,
    after_round,
    chain,
    energies,
    full,
    scheme_1,
    scheme_2,
    stationary,
)
from blackthorn.experiments.study import Context, Scale
from blackthorn.settings.config import make_config, read_recipe

COUNTS = (4, 4, 4, 4)
ETA, STEPS = 0.004, 3


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("scheme", ["full", "I", "II"])
def test_the_moments_are_those_of_all_cohorts_enumerated(scheme: str, rho: float) -> None:
    # Scheme II is for balanced data; the others take any shares.
    counts = COUNTS if scheme == "II" else (2, 3, 5, 6)
    data = draw_data(counts, 2, spread=0.7, precision=0.5)
    of = energies(data.x, data.y, data.prior_precision)
    np.testing.assert_allclose(of.posterior[1], np.linalg.inv(data.energy()[0]))
    cohorts, participation = _participation(scheme, data.share)
    maps = [expected_map(data, c, ETA, STEPS, 1.0, rho) for c in range(4)]
    ours = chain(of, [ETA] * STEPS, rho, participation)
    for found, expected in zip(stationary(ours), enumerated_stationary(maps, cohorts), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    start = np.array([1.0, -2.0]), np.array([[0.3, 0.1], [0.1, 0.2]])
    for found, expected in zip(
        after_round(ours, *start), next_moments(maps, cohorts, *start), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def _participation(scheme: str, share: np.ndarray) -> tuple[list[Cohort], Participation]:
    if scheme == "full":
        return full_cohort(share), full(share)
    if scheme == "I":
        return with_replacement(share, 3), scheme_1(share, 3)
    return subsets(4, 3), scheme_2(4, 3)


def test_step_sizes_may_change_within_a_round() -> None:
    data = draw_data((3, 5), 2, spread=0.5, precision=0.5)
    of = energies(data.x, data.y, data.prior_precision)
    one_by_one = np.array([1.0, 2.0]), np.zeros((2, 2))
    for eta in (0.01, 0.004):
        # With K = 1 the clients are averaged after every step: for one client alone that is the
        # same chain.
        alone = energies(data.x[:1], data.y[:1], data.prior_precision)
        one_by_one = after_round(chain(alone, [eta], 0.3, full(alone.p)), *one_by_one)
    together = after_round(
        chain(alone, [0.01, 0.004], 0.3, full(alone.p)), np.array([1.0, 2.0]), np.zeros((2, 2))
    )
    for found, expected in zip(together, one_by_one, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert of.convexity < of.smoothness


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("fa-ld-bayes-linear", sampled_distance.KNOWN_POSTERIOR),
        ("fa-ld-fashion-mnist", posterior_fashion.SETTING),
    ],
)
def test_the_experiments_are_the_recipes(
    repository: Path, name: str, setting: dict[str, object]
) -> None:
    recipe = read_recipe(repository / "recipes" / f"{name}.toml")
    assert make_config(recipe) == make_config(setting)


def test_fedavg_takes_the_same_cost_and_the_same_step_on_the_mean_loss() -> None:
    chosen = make_config({**posterior_fashion.SETTING, "seed": 2, "langevin-seed": 2})
    fedavg = posterior_fashion.fedavg_of(chosen, Path("a"))
    assert fedavg.algorithm == "gfedavg"
    # The chain's gradients are sums over all examples, those of FedAvg means.
    examples = chosen.num_clients * chosen.examples_per_client
    assert fedavg.local_lr == pytest.approx(chosen.local_lr * examples)
    differing = {k for k in type(chosen).model_fields if getattr(chosen, k) != getattr(fedavg, k)}
    assert differing == {
        *("algorithm", "local_lr", "temperature", "shared_noise", "prior_precision", "output_dir")
    }
    make_config(fedavg.model_dump(by_alias=True))


def test_a_sampled_chain_is_near_its_exact_law() -> None:
    settings = {**sampled_distance.KNOWN_POSTERIOR, "participation": "with-replacement"}
    settings |= {"clients-per-round": 2, "num-server-rounds": 300, "max-samples": 250}
    found = sampled_distance.sampled({**settings, "langevin-seed": 0}, Context())
    # Two draws of five: a bias many times the sampling error of 250 rounds.
    assert found["exact"] > 0.3
    assert found["sampled"] == pytest.approx(found["exact"], rel=0.35)


def test_a_cell_of_the_fashion_mnist_figure_has_every_system_s_scores(data_dir: str) -> None:
    (cell, *_) = posterior_fashion.cells(Scale(seeds=1, data_dir=data_dir))
    short = {**cell.settings, "num-server-rounds": 3, "burn-in": 1, "evaluate-every": 3}
    found = cell.work(short, Context(data_dir))
    for name in posterior_fashion.SYSTEMS:
        assert all(np.isfinite(value) for value in found[name].values())
        assert 0.2 < found[name]["accuracy"] <= 1
    # Two samples, of which the last is the point estimate: the mean is another prediction.
    assert found[posterior_fashion.POSTERIOR]["nll"] != found[posterior_fashion.LAST]["nll"]
    assert {len(heights) for heights in found["entropies"].values()} == {40}
