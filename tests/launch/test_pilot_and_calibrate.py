"""`blackthorn pilot` and `blackthorn calibrate`, as a person runs them."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from blackthorn.launch.cli import main
from blackthorn.launch.commands.pilot import _UNCLIPPED, NormRecorder, pilot_report
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.recording.run_folder import read_metrics
from blackthorn.server_app.run import prepare
from blackthorn.strategies import Release, spent

RECIPE = """\
algorithm = "ce-fedavg"
model = "logistic"
num-clients = 4
num-byzantine = 1
attack = "reverse-scaled-average"
aggregator = "rage"
corrupt-fraction = 0.25
num-server-rounds = 3
local-steps = 2
local-lr = 0.4
local-lr-decay = 0.5
"""


class Command:
    """Runs `blackthorn ...` in this process: exit code, and what was printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.out, self.err = "", ""

    def __call__(self, *arguments: str | Path) -> int:
        words = [str(argument) for argument in arguments]
        self._monkeypatch.setattr(sys, "argv", ["blackthorn", *words])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return code

    def number(self, pattern: str) -> float:
        """The number that `pattern` catches in what was printed."""
        found = re.search(pattern, self.out)
        assert found, f"{pattern!r} is not in:\n{self.out}"
        return float(found[1])


@pytest.fixture
def blackthorn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


# pilot


def rows(text: str) -> dict[str, tuple[float, float]]:
    """The table's numbers in parameter and in gradient units, by the row's name."""
    number = r"(\d[\d.e+-]*)"
    found = re.findall(rf"^(\S.*?) {{2,}}{number} +{number}$", text, re.MULTILINE)
    return {name: (float(parameter), float(gradient)) for name, parameter, gradient in found}


def test_pilot_measures_an_honest_unclipped_run(blackthorn: Command, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    assert blackthorn("pilot", recipe, "--set", "seed=3", "--output-dir", folder) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["algorithm"], summary["aggregator"], summary["attack"]) == (
        "gfedavg",
        "mean",
        "none",
    )
    entries = read_metrics(folder)[1:]
    assert [entry["local_lr"] for entry in entries] == [0.4, 0.2, 0.1]
    gradient = [v for e in entries for v in e["instruments"]["norm_gradient"].values()]
    parameter = [
        v * e["local_lr"] for e in entries for v in e["instruments"]["norm_gradient"].values()
    ]
    assert len(gradient) == 12
    found = rows(blackthorn.out)
    assert found["mean"] == pytest.approx((np.mean(parameter), np.mean(gradient)), rel=1e-3)
    c = (0.5 * np.mean(parameter), 0.5 * np.mean(gradient))
    assert found["c = 0.5 x mean"] == pytest.approx(c, rel=1e-3)
    for percent in (5, 25, 50, 75, 95):
        expected = [np.percentile(norms, percent) for norms in (parameter, gradient)]
        assert found[f"{percent}% quantile"] == pytest.approx(tuple(expected), rel=1e-3)
    assert "12 updates" in blackthorn.out
    assert "NOT private" in blackthorn.out


def test_what_pilot_advises_is_a_valid_run(blackthorn: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert blackthorn("pilot", recipe, "--output-dir", tmp_path / "pilot") == 0
    c = rows(blackthorn.out)["c = 0.5 x mean"]
    advice = [line.split() for line in blackthorn.out.splitlines() if "--set" in line]
    assert [words[:3] for words in advice] == [["blackthorn", "simulate", str(recipe)]] * 2
    for words, bound, unit in zip(advice, c, ("parameter", "gradient"), strict=True):
        folder = tmp_path / unit
        assert blackthorn(*words[1:], "--set", "instruments=true", "--output-dir", folder) == 0
        first = read_metrics(folder)[1]["instruments"]
        assert first[f"bound_{unit}"] == pytest.approx(bound, rel=1e-3)
        assert first["share_at_bound"] == 1.0


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "dp-fedavg", "epsilon": 3.0, "ledger": "spent.json"},
        {"algorithm": "error-feedback", "algorithm-options": "memory-clip = 1.0"},
        {"algorithm": "absent.py:Own", "algorithm-options": "length = 1.0"},
    ],
)
def test_pilot_leaves_what_is_the_recipe_s_algorithm_s_alone(
    tmp_path: Path, keys: dict[str, object]
) -> None:
    recipe = tmp_path / "recipe.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"clip-norm": 1.0, **keys}.items()]
    recipe.write_text("\n".join(lines))
    prepared = prepare(recipe_config(recipe, (), {**_UNCLIPPED, "output-dir": str(tmp_path / "x")}))
    assert prepared.config.algorithm == "gfedavg"
    assert prepared.plan is None


def test_pilot_of_clients_that_take_turns_asks_all(blackthorn: Command, tmp_path: Path) -> None:
    """Turns and a threshold that moves are for the sake of noise, of which a pilot has none."""
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(
        'task = "digits"\nalgorithm = "dp-fedavg"\nmodel = "logistic"\nnum-clients = 4\n'
        "num-server-rounds = 2\nlocal-steps = 1\nbatch-size = 8\nreport = false\n"
        'participation = "rotating"\nbands = 2\nnoise-multiplier = 0.01\nclip-norm = 1.0\n'
        "clip-quantile = 0.5\n"
    )
    assert blackthorn("pilot", recipe, "--output-dir", folder) == 0
    assert json.loads((folder / "summary.json").read_text())["clients"]["invited"] == 8


def test_pilot_needs_a_recipe_that_is_right(blackthorn: Command, tmp_path: Path) -> None:
    assert blackthorn("pilot", tmp_path / "none.toml") == 2
    assert re.fullmatch(r"error: recipe \S+ does not exist\n", blackthorn.err)
    assert blackthorn("pilot", "demo", "--set", "local-lr=-1") == 2
    assert "local-lr = -1" in blackthorn.err
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert blackthorn("pilot", recipe, "--set", "local-lr=-1") == 2
    assert blackthorn.err.startswith("error: local-lr = -1")
    assert blackthorn.err.count("\n") == 1


def test_pilot_without_any_norm_fails(blackthorn: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    folder = tmp_path / "run"
    # Nobody's model stays finite.
    large = ("--set", "local-lr=3e38", "--set", "local-steps=20")
    assert blackthorn("pilot", recipe, *large, "--output-dir", folder) == 1
    assert blackthorn.err.startswith("failed: ")
    assert blackthorn.err.count("\n") == 1


def test_pilot_that_fails_itself_says_so(blackthorn: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    folder = tmp_path / "run"
    assert blackthorn("pilot", recipe, "--set", "local-lr=2e38", "--output-dir", folder) == 0
    assert "The pilot run itself failed in round" in blackthorn.out


def test_the_report_has_mean_and_quantiles_of_the_norms() -> None:
    norms = NormRecorder()
    norms.parameter, norms.gradient = [1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 500.0]
    found = rows(pilot_report(Path("a.toml"), norms))
    assert found == {
        "c = 0.5 x mean": (1.5, 60.0),
        "mean": (3.0, 120.0),
        "5% quantile": (1.2, 12.0),
        "25% quantile": (2.0, 20.0),
        "50% quantile": (3.0, 30.0),
        "75% quantile": (4.0, 40.0),
        "95% quantile": (4.8, 408.0),
    }
    assert "itself failed" not in pilot_report(Path("a.toml"), norms)
    assert "itself failed in round 7" in pilot_report(Path("a.toml"), norms, 7)


# calibrate


def calibrate(blackthorn: Command, *more: str, alpha: str = "1.5") -> int:
    size = ("--clients", "16", "--local-steps", "25", "--rounds", "100", "--alpha", alpha)
    return blackthorn("calibrate", "fat-clipping", *size, *more)


def test_calibrate_prints_both_theorems(blackthorn: Command) -> None:
    assert calibrate(blackthorn, alpha="2") == 0
    assert "ORDERS OF MAGNITUDE, not tuned values" in blackthorn.out
    pr, pi = blackthorn.out.split("FAT-Clipping-PI")
    assert "FAT-Clipping-PR (Theorem 2)" in pr
    assert pi.startswith(" (Theorem 4)")
    # At alpha = 2: PR sqrt(m/(K^2 T))/sqrt(K^0)..., worked out in test_schedules.
    blackthorn.out = pr
    assert blackthorn.number(r"server-lr x local-lr +(\S+)") == pytest.approx(0.016)
    assert blackthorn.number(r"local-lr +at most (\S+)") == pytest.approx(
        1600**-0.25 / 25, rel=5e-3
    )
    assert blackthorn.number(r"clip-norm \(gradient units\) +(\S+)") == pytest.approx(158, rel=5e-3)
    assert blackthorn.number(r"squared gradient norm: (\S+)") == pytest.approx(0.025)
    blackthorn.out = pi
    assert blackthorn.number(r"server-lr x local-lr +(\S+)") == pytest.approx(0.08)
    assert blackthorn.number(r"local-lr +at most (\S+)") == pytest.approx(40_000**-0.25, rel=5e-3)
    assert blackthorn.number(r"better (\S+):") == pytest.approx(40_000**-0.25 / 25, rel=5e-3)
    assert blackthorn.number(r"clip-norm \(gradient units\) +(\S+)") == pytest.approx(
        math.sqrt(200), rel=5e-3
    )
    assert blackthorn.number(r"squared gradient norm: (\S+)") == pytest.approx(0.005)


def test_calibrate_prints_the_bounds_for_strong_convexity(blackthorn: Command) -> None:
    assert calibrate(blackthorn, "--mu", "0.5", alpha="2") == 0
    assert "FAT-Clipping-PR (Theorem 1)" in blackthorn.out
    assert "FAT-Clipping-PI (Theorem 3)" in blackthorn.out
    assert blackthorn.out.count("left open") == 1
    assert "better" not in blackthorn.out
    assert blackthorn.number(r"to its minimum: (\S+)\s+FAT-Clipping-PI") == pytest.approx(0.0156)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--alpha", "1"), "alpha = 1 is not allowed"),
        (("--alpha", "2.5"), "alpha = 2.5 is not allowed"),
        (("--alpha", "nan"), "alpha = nan is not allowed"),
        (("--clients", "0"), "clients = 0 is not allowed"),
        (("--local-steps", "-2"), "local-steps = -2 is not allowed"),
        (("--rounds", "0"), "rounds = 0 is not allowed"),
        (("--mu", "0"), "mu = 0 is not allowed"),
        (("--mu", "nan"), "mu = nan is not allowed"),
        (("--rounds", "1" + "0" * 400), "beyond the range"),
    ],
)
def test_wrong_values_are_one_line(
    blackthorn: Command, arguments: tuple[str, str], expected: str
) -> None:
    assert calibrate(blackthorn, *arguments) == 2
    assert expected in blackthorn.err
    assert blackthorn.err.startswith("error: ")
    assert blackthorn.err.count("\n") == 1
    assert blackthorn.out == ""


def test_calibrate_names_what_it_can(blackthorn: Command) -> None:
    assert blackthorn("calibrate", "--help") == 0
    assert "fat-clipping" in blackthorn.out


def test_calibrate_dp_prints_z_under_every_accountant(blackthorn: Command) -> None:
    budget = ("--epsilon", "5", "--delta", "1e-5", "--sample-rate", "0.2", "--rounds", "50")
    assert blackthorn("calibrate", "dp", *budget) == 0
    for name, golden in {"rdp": 1.664, "prv": 1.555, "pld": 1.555}.items():
        assert blackthorn.number(rf"(?m)^{name} +(\S+)") == pytest.approx(golden, rel=0.01)
    assert blackthorn("calibrate", "dp", *budget, "--accountant", "rdp") == 0
    assert "prv" not in blackthorn.out


def test_calibrate_dp_says_what_each_neighbour_relation_costs(blackthorn: Command) -> None:
    budget = ("--epsilon", "5", "--sample-rate", "0.2", "--rounds", "50", "--accountant", "pld")
    assert blackthorn("calibrate", "dp", *budget) == 0
    heads = blackthorn.out.splitlines()[2].split()
    assert heads == ["accountant", "add-remove", "zero-out", "replace-one"]
    found = re.search(r"^pld +(\S+) +(\S+) +(\S+)$", blackthorn.out, re.MULTILINE)
    assert found
    poisson, zero_out, replace_one = map(float, found.groups())
    charges = [
        (Release(poisson, sample_rate=0.2), 50),
        (Release(zero_out), 50),
        (Release(replace_one / 2, drawn=(20, 100)), 50),
    ]
    for charge in charges:
        assert spent([charge], 1e-5, "pld").epsilon == pytest.approx(5.0, rel=2e-3)
    # Twice the sensitivity.
    assert 2 * poisson < replace_one < 2.3 * poisson
    # The exact Gaussian: 8.919 for 100 rounds at this budget (arXiv 2306.08153's comparison).
    assert zero_out == pytest.approx(8.919 / math.sqrt(2), rel=1e-3)
    for kind in heads[1:]:
        assert re.search(rf"^{kind} +one client", blackthorn.out, re.MULTILINE)
    assert "not the run's own clients for replace-one" in blackthorn.out


def analytic_gaussian(mu: float, delta: float) -> float:
    """ε of N(0, 1) against N(mu, 1): Balle and Wang (arXiv 1805.06530), Theorem 8, solved."""

    def excess(epsilon: float) -> float:
        a, b = norm.logcdf(mu / 2 - epsilon / mu), norm.logcdf(-mu / 2 - epsilon / mu)
        return math.exp(a) - math.exp(epsilon + b) - delta

    return float(brentq(excess, 0, 1000, xtol=1e-12))


def test_calibrate_dp_says_what_a_noise_multiplier_costs(blackthorn: Command) -> None:
    """Without sampling T rounds are one Gaussian, √T/z away; of one client for another, twice."""
    z, rounds, delta = 3.0, 20, 1e-6
    run = ("--rounds", str(rounds), "--delta", str(delta))
    assert blackthorn("calibrate", "dp", "--noise-multiplier", str(z), *run) == 0
    assert blackthorn.out.startswith("noise-multiplier z = 3, delta = 1e-06: epsilon for 20 rounds")
    mu = math.sqrt(rounds) / z
    exact = [analytic_gaussian(m, delta) for m in (mu, mu, 2 * mu)]
    rows = {line.split()[0]: line.split()[1:] for line in blackthorn.out.splitlines() if line}
    for accountant in ("prv", "pld"):
        assert [float(e) for e in rows[accountant]] == pytest.approx(exact, abs=1e-4)
    for least, by_rdp in zip(exact, map(float, rows["rdp"]), strict=True):
        assert least < by_rdp < 1.2 * least


def test_calibrate_dp_gives_back_the_epsilon_that_its_noise_is_for(blackthorn: Command) -> None:
    """What a cohort that is drawn costs is what its own budget asks for, in its own column."""
    run = ("--sample-rate", "0.2", "--rounds", "50", "--accountant", "rdp")
    assert blackthorn("calibrate", "dp", "--epsilon", "5", *run) == 0
    z = blackthorn.number(r"rdp +(\S+)")
    assert blackthorn("calibrate", "dp", "--noise-multiplier", str(z), *run) == 0
    assert blackthorn.number(r"rdp +(\S+)") == pytest.approx(5.0, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--noise-multiplier", "0"), "noise-multiplier = 0.0 is not allowed: above 0"),
        (("--noise-multiplier", "nan"), "noise-multiplier = nan is not allowed: above 0"),
        (("--noise-multiplier", "inf"), "noise multiplier = inf is not allowed"),
        (("--noise-multiplier", "1", "--epsilon", "1"), "give one of the two"),
        ((), "give one of the two"),
        (("--noise-multiplier", "1", "--rounds", "0"), "rounds = 0 is not allowed: 1 to 1e+12"),
        (("--noise-multiplier", "1", "--rounds", f"{10**13}"), "rounds = 10000000000000 is not"),
        (("--noise-multiplier", "1", "--delta", "0"), "delta = 0"),
    ],
)
def test_calibrate_dp_refuses_what_has_no_epsilon(
    blackthorn: Command, arguments: tuple[str, ...], expected: str
) -> None:
    assert blackthorn("calibrate", "dp", "--rounds", "5", *arguments) == 2
    assert expected in blackthorn.err
    assert blackthorn.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--epsilon", "0"), "epsilon = 0"),
        (("--delta", "2"), "delta = 2"),
        (("--sample-rate", "0"), "sample rate = 0"),
        (("--rounds", "0"), "rounds = 0"),
        (("--accountant", "best"), "accountant = 'best' is not allowed: rdp, prv, pld"),
    ],
)
def test_calibrate_dp_refuses_in_one_line(
    blackthorn: Command, arguments: tuple[str, str], expected: str
) -> None:
    assert blackthorn("calibrate", "dp", "--epsilon", "1", "--rounds", "5", *arguments) == 2
    assert expected in blackthorn.err
    assert blackthorn.err.count("\n") == 1


def test_calibrate_dp_knows_clients_that_take_turns(
    blackthorn: Command,
) -> None:
    budget = ("calibrate", "dp", "--epsilon", "5", "--rounds", "100", "--accountant", "pld")
    assert blackthorn(*budget, "--bands", "5") == 0
    told = blackthorn.out
    assert "ask one of 5 groups in turn" in told
    row = next(line.split() for line in told.splitlines() if line.startswith("pld"))
    assert [float(z) for z in row[1:]] == pytest.approx([3.989, 3.989, 2 * 3.989], rel=1e-3)
    # 15.11 and 28.34 in units of clip-norm.
    assert "3.788 with banded-noise, 7.106 without" in told
    assert blackthorn(*budget, "--bands", "5", "--sample-rate", "0.5") == 2


def test_calibrate_has_the_other_papers_theorems(blackthorn: Command) -> None:
    rage = ["calibrate", "rage", "--clients", "200", "--local-steps", "7", "--rounds", "25"]
    rage += ["--corrupt-fraction", "0.125", "--smoothness", "10", "--dissimilarity", "0.5"]
    assert blackthorn(*rage, "--error", "1000") == 0
    assert blackthorn.number(r"local-lr +(\S+)") == pytest.approx(1 / (5 * 7 * 10), rel=1e-2)
    error = 4.8 * (2 * 0.125 + 25) * 0.5
    assert blackthorn.number(r"for that error +at most (\d+)") == math.floor(1000 / error)
    assert "ORDERS OF MAGNITUDE" in blackthorn.out
    assert blackthorn(*rage, "--batch-variance", "1", "--dimension", "19885") == 0
    assert blackthorn.number(r"local-lr +(\S+)") == pytest.approx(1 / (8 * 7 * 10), rel=1e-2)

    private = ["calibrate", "dp-fedavg", "--clients", "3000", "--sample-rate", "0.2"]
    private += ["--dimension", "7850", "--epsilon", "5", "--clip-norm", "62.5", "--smoothness", "1"]
    assert blackthorn(*private) == 0
    rho = math.sqrt(7850 * math.log(1e5)) / 15000
    assert blackthorn.number(r"local-lr \(server-lr = 1\) +(\S+)") == pytest.approx(
        rho / 2, rel=1e-2
    )
    assert "ORDERS OF MAGNITUDE" in blackthorn.out and "calibrate dp" in blackthorn.out

    two_sided = ["calibrate", "ce-fedavg", "--clients", "80", "--local-steps", "32"]
    assert blackthorn(*two_sided, "--rounds", "200", "--smoothness", "10") == 0
    assert blackthorn.number(r"server-lr +(\S+)") == pytest.approx(math.sqrt(80 * 32), rel=1e-2)
    assert "NOT met" in blackthorn.out and "ORDERS OF MAGNITUDE" in blackthorn.out

    assert blackthorn(*rage[:-5], "0.5", *rage[-4:]) == 2
    assert blackthorn.err == ("error: corrupt-fraction = 0.5 is not allowed: from 0 to a third\n")
