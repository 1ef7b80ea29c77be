"""The comparison tables of FA-LD: what is compared, and when a table says that it differs."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import fa_ld
from launch.cli import app
from server_app.config import make_config, read_recipe


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("fa-ld-bayes-linear", fa_ld.KNOWN_POSTERIOR),
        ("fa-ld-fashion-mnist", fa_ld.FASHION_MNIST),
    ],
)
def test_the_experiments_are_the_recipes(
    repository: Path, name: str, setting: dict[str, object]
) -> None:
    recipe = read_recipe(repository / "recipes" / f"{name}.toml")
    assert make_config(recipe) == make_config(setting)


def test_fedavg_takes_the_same_cost_and_the_same_step_on_the_mean_loss() -> None:
    chain = fa_ld._config("", 2, 150, Path("a"))
    fedavg = fa_ld._fedavg("", 2, 150, Path("a"))
    assert fedavg.algorithm == "gfedavg"
    # The chain's gradients are sums over all examples, those of FedAvg means.
    examples = chain.num_clients * chain.examples_per_client
    assert fedavg.local_lr == pytest.approx(chain.local_lr * examples)
    differing = {k for k in type(chain).model_fields if getattr(chain, k) != getattr(fedavg, k)}
    assert differing == {
        *("algorithm", "local_lr", "temperature", "shared_noise", "prior_precision")
    }
    make_config(fedavg.model_dump(by_alias=True))


def figures(nll: tuple[float, float, float], ece: tuple[float, float, float]) -> fa_ld.Figures:
    names = (fa_ld.POSTERIOR, fa_ld.LAST, fa_ld.FEDAVG)
    return {
        name: {
            **{figure: np.array([0.5, 0.6]) for figure in (*fa_ld.FIGURES, "ood")},
            "nll": np.array([nll[i], 0.1 + nll[i]]),
            "ece": np.array([ece[i], 0.1 + ece[i]]),
        }
        for i, name in enumerate(names)
    }


@pytest.mark.parametrize(
    ("nll", "ece", "differs"),
    [
        ((0.5, 0.6, 0.7), (0.1, 0.2, 0.3), []),
        ((0.5, 0.4, 0.7), (0.1, 0.2, 0.3), ["NLL, last iterate"]),
        ((0.5, 0.6, 0.7), (0.1, 0.2, 0.05), ["ECE, FedAvg"]),
    ],
)
def test_the_table_says_what_differs(
    nll: tuple[float, float, float], ece: tuple[float, float, float], differs: list[str]
) -> None:
    findings = fa_ld.fashion_mnist_findings(figures(nll, ece))
    assert [f.what for f in findings if not f.holds] == differs
    assert len(findings) == 18
    ours = next(f for f in findings if f.what == "NLL, posterior averaging")
    assert ours.measured == "0.550 (0.500 to 0.600)"


def test_w2_s_table_says_what_differs() -> None:
    right = dict(zip(fa_ld.VARIATIONS, (0.2, 0.1, 0.05, 0.3, 0.4), strict=True))
    assert all(finding.holds for finding in fa_ld.bayes_linear_findings(right))
    wrong = dict(zip(fa_ld.VARIATIONS, (0.2, 0.25, 0.05, 0.3, 0.25), strict=True))
    assert [f.holds for f in fa_ld.bayes_linear_findings(wrong)] == [True, False, True, True, False]


def test_the_command_prints_the_distances() -> None:
    done = CliRunner().invoke(app, ["reproduce", "fa-ld", "--only", "bayes-linear"])
    assert done.exit_code == 0, done.output
    assert "W2, as in the recipe" in done.output
    assert "differs" not in done.output


def test_fashion_mnist_in_small(data_dir: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = fa_ld.fashion_mnist(
        data_dir,
        num_seeds=1,
        num_rounds=3,
        advance=lambda done, of: told.append((done, of)),
        plots=tmp_path,
    )
    assert set(found) == {fa_ld.POSTERIOR, fa_ld.LAST, fa_ld.FEDAVG}
    for row in found.values():
        assert all(np.isfinite(values).all() and len(values) == 1 for values in row.values())
        assert 0.2 < row["accuracy"][0] <= 1
    # Two samples, of which the last is the point estimate: the mean is another prediction.
    assert found[fa_ld.POSTERIOR]["nll"] != found[fa_ld.LAST]["nll"]
    assert told[-1] == (6, 6)
    assert (tmp_path / "fa-ld-entropy.png").read_bytes().startswith(b"\x89PNG")
