"""Several chains in one run: what is each one's own, what they say together, and going on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from blackthorn.launch.cli import app
from blackthorn.launch.commands.chains import CHAINS, chain_folder, simulate_chains, starts
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.posterior_store import read_samples
from blackthorn.recording.run_folder import read_metrics
from blackthorn.reporting.posterior_diagnostics import Diagnosis
from blackthorn.reporting.posterior_report import mixing
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig, make_config
from blackthorn.settings.derived import chain_seed
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import load_problem

RECIPE = Path(__file__).parents[2] / "recipes" / "fsgld-bayes-linear.toml"


def configuration(folder: Path, **options: Any) -> RunConfig:
    values: dict[str, Any] = {"chains": 2, "num-server-rounds": 20, "burn-in": 10}
    values |= {"langevin-seed": 3, "report": False, "output-dir": str(folder)}
    values |= {key.replace("_", "-"): value for key, value in options.items()}
    return recipe_config(RECIPE, (), values)


def samples(folder: Path, number: int) -> np.ndarray:
    return np.stack([one.state["x"] for one in read_samples(chain_folder(folder, number))])


def invited(folder: Path, number: int) -> list[Any]:
    entries = (chain_folder(folder, number) / "clients.jsonl").read_text().splitlines()
    return [json.loads(line) for line in entries]


def test_chains_have_cohorts_noise_and_starts_of_their_own_and_one_summary(tmp_path: Path) -> None:
    summary = simulate_chains(configuration(tmp_path / "run"), Console(quiet=True))
    folder = tmp_path / "run"
    first, second = (samples(folder, number) for number in (1, 2))
    assert first.shape == second.shape == (10, 3)
    assert np.abs(first - second).min() > 0
    assert invited(folder, 1) != invited(folder, 2)
    losses = [read_metrics(chain_folder(folder, n))[0]["loss"] for n in (1, 2)]
    assert losses[0] != losses[1]
    told = json.loads((folder / CHAINS).read_text())
    assert told["chains"] == 2
    assert told["samples"] == 20
    assert summary["posterior"] == {k: v for k, v in told.items() if k != "scalars"}
    assert told["ess_min"] == min(row["ess"] for row in told["scalars"])
    assert told["ess_tail_min"] == min(row["ess_tail"] for row in told["scalars"])


def test_a_chain_alone_is_the_chain_of_several(tmp_path: Path) -> None:
    """What the last one computes hangs on its number alone, not on those before it."""
    simulate_chains(configuration(tmp_path / "run"), Console(quiet=True))
    alone = configuration(
        chain_folder(tmp_path / "alone", 2), chains=1, chain=2, langevin_seed=4, initial_point=0.0
    )
    simulate(alone, Console(quiet=True))
    np.testing.assert_array_equal(samples(tmp_path / "run", 2), samples(tmp_path / "alone", 2))


def test_chains_that_were_cut_off_go_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is completed, the second has died, and the third has not begun."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    simulate_chains(configuration(whole, chains=3), Console(quiet=True))

    class Cut(Exception):
        pass

    from blackthorn.launch.commands import chains

    def dies(config: RunConfig, console: Console, label: str) -> dict[str, Any]:
        def at_14(report: RoundReport) -> None:
            if config.chain == 2 and report.server_round == 14:
                raise Cut

        return simulate(config, console, label, [at_14])

    monkeypatch.setattr(chains, "simulate", dies)
    with pytest.raises(Cut):
        simulate_chains(configuration(cut, chains=3), Console(quiet=True))
    monkeypatch.undo()
    again = configuration(cut, chains=3, resume=str(cut), output_dir="")
    simulate_chains(again, Console(quiet=True))
    for number in (1, 2, 3):
        np.testing.assert_array_equal(samples(cut, number), samples(whole, number))
    assert (cut / CHAINS).read_text() == (whole / CHAINS).read_text()


def test_the_command_runs_them_and_says_in_words_whether_they_have_mixed(tmp_path: Path) -> None:
    options = ["chains=2", "num-server-rounds=20", "burn-in=10", "report=false"]
    arguments = [part for option in options for part in ("--set", option)]
    done = CliRunner().invoke(
        app, ["simulate", str(RECIPE), *arguments, "--output-dir", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    assert "2 chains of 10 samples" in done.output
    assert "posterior: 20 samples of 2 chains" in done.output
    assert "not mixed: " in done.output


def scalar(rhat: float, ess: float = 1e3, tail: float = 1e3) -> Diagnosis:
    return Diagnosis("theta-1", 0.0, 1.0, ess, tail, rhat)


def test_the_words_name_what_is_worst_and_what_to_change() -> None:
    fine = scalar(1.001)
    assert mixing([fine], 4) == "mixed: split-R-hat at most 1.01, effective samples at least 400"
    apart = mixing([fine, scalar(1.2)], 4)
    assert "theta-1 has a split-R-hat of 1.200, above 1.01: the chains end in different" in apart
    assert "num-server-rounds" in apart
    assert "the chain still drifts" in mixing([scalar(1.2)], 1)
    for few in (scalar(1.0, ess=399), scalar(1.0, tail=399)):
        assert "worth 399 independent ones, fewer than 400" in mixing([fine, few], 4)
        assert mixing([few], 3).startswith("mixed")
    assert mixing([scalar(float("nan"))], 1).startswith("not known to have mixed")


def test_starts_are_on_both_sides_and_apart() -> None:
    assert starts(1.0, 5) == [1.0, 0.0, 2.0, -1.0, 3.0]
    assert starts(0.0, 3) == [0.0, -1.0, 1.0]


def test_a_chain_s_seed_is_the_run_s_for_none_and_its_own_for_each() -> None:
    values = {"algorithm": "fa-ld", "model": "mlp-8", "num-clients": 3}
    configs = [make_config({**values, "chain": number}) for number in range(5)]
    assert chain_seed(configs[0]) == configs[0].seed
    assert len({chain_seed(config) for config in configs}) == 5
    one, other = (load_problem(config) for config in configs[1:3])
    name = next(iter(one.state()))
    assert not np.array_equal(one.state()[name].numpy(), other.state()[name].numpy())
    first, second = (
        problem.shards()[0].batch(np.random.default_rng(0), 0)[0].numpy()
        for problem in (one, other)
    )
    np.testing.assert_array_equal(first, second)
    assert build_strategy(configs[1])._seed == chain_seed(configs[1])


def test_elsewhere_several_chains_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chains = 2 is not allowed here") as caught:
        prepare(configuration(tmp_path / "run"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
