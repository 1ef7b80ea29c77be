"""What was told before a private run began is in its summary and report as well."""

import html
import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from digits_runs import PRIVATE, configuration, private_run
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import RDPAccountant
from rich.console import Console

from blackthorn.launch.cli import finish
from blackthorn.launch.commands.cluster import _fail, _Ready
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import read_summary
from blackthorn.settings.rounding import upward
from blackthorn.strategies import spent
from blackthorn.strategies.accounting import Release

COHORT: dict[str, Any] = {
    "participation": "fixed",
    "sample_rate": 1.0,
    "clients_per_round": 2,
    "neighbours": "replace-one",
}


def told_of_privacy(summary: dict[str, Any]) -> list[str]:
    """The warnings without those of noise beside which nothing can be learned."""
    return [line for line in summary["warnings"] if "expect the model to learn" not in line]


def report_of(folder: Path) -> str:
    return html.unescape((folder / "report.html").read_text())


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_run_that_its_budget_ends_says_so_afterwards(
    earlier: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget of four rounds, of which earlier runs have had some."""
    ledger = str(tmp_path / "ledger.json")
    for number in range(earlier):
        private_run(tmp_path / f"{number}", ledger=ledger, num_server_rounds=1)
    budget = 1.0001 * spent([(Release(2.0, 0.5), 4)], 1e-5).epsilon
    options = {"max_epsilon": budget, "num_server_rounds": 9, "ledger": ledger, "report": True}
    summary = private_run(tmp_path / "run", Console(width=500), **options)
    line = f"max-epsilon = {budget:g} ends the run after {4 - earlier} of 9 rounds"
    if earlier:
        line += f": the ledger holds {earlier} of other runs"
    assert told_of_privacy(summary)[-1] == line
    assert summary["rounds_completed"] == 4 - earlier
    assert f"warning: {line}\n" in capsys.readouterr().out
    assert line in report_of(tmp_path / "run")


@pytest.mark.parametrize(("accountant", "told"), [("prv", True), ("pld", False), ("rdp", False)])
def test_an_accountant_that_another_stands_in_for_is_told(
    accountant: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {**COHORT, "accountant": accountant}
    summary = private_run(tmp_path, Console(width=500), report=True, **options)
    line = (
        "accountant prv is out of its range (it knows no cohorts drawn without replacement): "
        "the figure is pld's"
    )
    assert told_of_privacy(summary) == ([line] if told else [])
    assert summary["privacy"]["accountant"] == ("pld" if told else accountant)
    assert (f"warning: {line}" in capsys.readouterr().out) == told
    assert (line in report_of(tmp_path)) == told


def test_the_summary_alone_gives_the_figure_of_a_cohort(tmp_path: Path) -> None:
    """Recomputed by dp-accounting, for cohorts without replacement of which half are drawn."""
    summary = private_run(tmp_path, **COHORT, noise_multiplier=20.0, report=True)
    privacy = summary["privacy"]
    assert (privacy["cohort_size"], privacy["num_clients"]) == (2, 4)
    noise = dp_accounting.GaussianDpEvent(privacy["noise_multiplier"] / 2)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        privacy["num_clients"], int(privacy["cohort_size"]), noise
    )
    accountant = RdpAccountant(range(2, 257), dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event, privacy["rounds_charged"])
    # Orders of its own: a bound as good within a hundredth.
    by_library = accountant.get_epsilon(privacy["delta"])
    assert privacy["epsilon"] == pytest.approx(by_library, rel=1e-2)
    assert "2 of 4 clients, drawn without replacement" in report_of(tmp_path)


@pytest.mark.parametrize(("options", "covered"), [({}, True), (COHORT, False)])
def test_where_the_run_ends_it_says_whether_its_clients_may_be_the_adversary(
    options: dict[str, Any], covered: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients of a cohort of fixed size know what the others are together."""
    summary = private_run(tmp_path, noise_multiplier=20.0, report=True, **options)
    finish(summary)
    told = summary["privacy"]
    assert told["covers_clients"] == covered
    assert ("all other clients together included" in told["claim"]) == covered
    assert ("the run's own clients" in told["claim"]) != covered
    # However wide the terminal is.
    last = " ".join(capsys.readouterr().out.split())
    assert ("(not against the run's own clients, at least: see its claim)" in last) != covered
    assert f"epsilon {upward(told['epsilon'])}" in last
    assert told["claim"] in report_of(tmp_path)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({"noise_location": "client"}, {}),
        (
            {**COHORT, "noise_multiplier": 20.0},
            {**COHORT, "participation": "full", "clients_per_round": 0, "noise_multiplier": 20.0},
        ),
    ],
)
def test_what_clients_know_of_an_earlier_run_of_the_ledger_counts(
    earlier: dict[str, Any], later: dict[str, Any], tmp_path: Path
) -> None:
    """The figure is of all rounds in the ledger, and so is against whom it holds."""
    ledger = str(tmp_path / "ledger.json")
    assert not private_run(tmp_path / "a", ledger=ledger, **earlier)["privacy"]["covers_clients"]
    told = private_run(tmp_path / "b", ledger=ledger, **later)["privacy"]
    alone = private_run(tmp_path / "c", **later)["privacy"]
    assert (told["covers_clients"], alone["covers_clients"]) == (False, True)
    assert "in other runs of the ledger" in told["claim"]
    assert "all other clients together included" not in told["claim"]
    assert "all other clients together included" in alone["claim"]


def test_a_ledger_that_does_not_say_who_drew_its_noise_covers_no_clients(tmp_path: Path) -> None:
    """An earlier version wrote the same for noise at the server and at the clients."""
    path = tmp_path / "ledger.json"
    assert private_run(tmp_path / "a", ledger=str(path))["privacy"]["covers_clients"]
    content = json.loads(path.read_text())
    for charge in content["charges"]:
        del charge["noise_shares"]
    path.write_text(json.dumps(content))
    for again in ("b", "c"):
        told = private_run(tmp_path / again, ledger=str(path))["privacy"]
        assert told["covers_clients"] is False
        assert "an earlier version did not note who drew the noise" in told["claim"]
        assert "all other clients together included" not in told["claim"]


def test_every_round_at_the_terminal_says_what_was_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private_run(tmp_path, Console(width=500))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    expected = [spent([(Release(2.0, 0.5), rounds)], 1e-5).epsilon for rounds in (1, 2, 3)]
    assert [line.split("epsilon ")[1].split()[0] for line in shown[-3:]] == [
        upward(epsilon) for epsilon in expected
    ]


@pytest.mark.parametrize("clients_too", [False, True])
def test_the_privacy_of_examples_is_told_where_the_run_ends(
    clients_too: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is Opacus's figure for 3 rounds of 2 steps, and that of a client that trained in all."""
    options: dict[str, Any] = {
        "instruments": False,
        "local_dp_sgd": True,
        "dp_sgd_sample_rate": 0.2,
        "batch_size": 10,
        "local_steps": 2,
        "dp_sgd_noise_multiplier": 1.0,
        "report": True,
    }
    if clients_too:
        options |= {**PRIVATE, "participation": "full", "sample_rate": 1.0}
    summary = simulate(configuration(tmp_path, **options), Console(quiet=True))
    finish(summary)
    told = summary["sample_privacy"]
    opacus = RDPAccountant()
    opacus.history = [(1.0, 0.2, 6)]
    assert told["epsilon"] == pytest.approx(opacus.get_epsilon(1e-5), rel=1e-2)
    assert (told["delta"], told["level"]) == (1e-5, "examples of each client")
    assert "against everybody, the server too" in told["claim"]
    lines = (tmp_path / ("operator.jsonl" if clients_too else "metrics.jsonl")).read_text()
    said = json.loads(lines.splitlines()[-1])["sample_epsilon"]
    assert set(said.values()) == {told["epsilon"]}
    assert f", epsilon of an example {upward(told['epsilon'])}" in capsys.readouterr().out
    assert f"ε = {upward(told['epsilon'], 4)} at δ = 1e-05: {told['claim']}" in report_of(tmp_path)


def test_what_a_dead_run_s_states_say_counts_though_none_can_be_read(tmp_path: Path) -> None:
    """Their names tell how many rounds had been begun: here five were done again."""
    options = {"instruments": False, "local_dp_sgd": True, "dp_sgd_sample_rate": 0.2}
    options |= {"batch_size": 10, "local_steps": 2, "dp_sgd_noise_multiplier": 1.0}
    config = configuration(tmp_path, **options, num_server_rounds=2)
    simulate(config, Console(quiet=True))
    (tmp_path / "summary.json").unlink()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / f"round-00002-00007-{32 * 'a'}.safetensors").write_bytes(b"torn")
    _fail(_Ready(config, tmp_path, -1), "the ServerApp's process has died")
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["sample_privacy"]["rounds"] == 7 + 1


def test_a_cluster_whose_server_died_counts_the_round_under_way_for_examples(
    tmp_path: Path,
) -> None:
    """By Opacus, for the two rounds on record and one that may have been under way."""
    options = {"instruments": False, "local_dp_sgd": True, "dp_sgd_sample_rate": 0.2}
    options |= {"batch_size": 10, "local_steps": 2, "dp_sgd_noise_multiplier": 1.0}
    config = configuration(tmp_path, **options, num_server_rounds=2)
    simulate(config, Console(quiet=True))
    (tmp_path / "summary.json").unlink()
    _fail(_Ready(config, tmp_path, -1), "the ServerApp's process has died")
    summary = read_summary(tmp_path)
    assert summary is not None
    opacus = RDPAccountant()
    opacus.history = [(1.0, 0.2, 2 * 3)]
    assert summary["sample_privacy"]["rounds"] == 3
    assert summary["sample_privacy"]["epsilon"] == pytest.approx(opacus.get_epsilon(1e-5), rel=1e-2)


def test_without_dp_sgd_there_is_no_privacy_of_examples(tmp_path: Path) -> None:
    assert "sample_privacy" not in private_run(tmp_path)
