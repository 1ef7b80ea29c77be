"""Every charge names the run that made it: an older copy of a ledger in which others were charged
as many rounds since is not the run's, however alike it looks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from charged_ledgers import read_charges, rounds_in
from digits_runs import configuration
from killed_runs import NOISED, ROUNDS, Killed, die_after, kill, other_run, resume
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording import state_files
from blackthorn.recording.privacy import privacy_of_dead_run
from blackthorn.recording.state_files import Saved
from blackthorn.reporting.report_privacy import spent_by_round
from blackthorn.reporting.run_record import read_record
from blackthorn.reporting.run_report import write_report
from blackthorn.settings.config import ConfigError
from blackthorn.strategies import (
    ClipNorm,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
    Release,
    spent,
)

# A state after round 2 and none after: what came since is shown by lines and checkpoints alone.
STATES = {**NOISED, "state_every": 2, "checkpoint_every": 1}
Z, CHEAPER = 2.0, 50.0


def older_copy(path: Path, rounds: int, z: float) -> None:
    """The ledger as it was after `rounds`, charged by another run up to what it holds now."""
    content = json.loads(path.read_text())
    held = content["rounds"]
    assert len(content["charges"]) == 1
    content["rounds"] = content["charges"][0]["rounds"] = rounds
    path.write_text(json.dumps(content))
    other_run(path, held - rounds, z)
    assert rounds_in(path) == held


def dead(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    told = privacy_of_dead_run(configuration(folder, **options), folder)
    assert told is not None
    return told


@pytest.mark.parametrize("z", [Z, CHEAPER])
@pytest.mark.parametrize("lives", [1, 2])
@pytest.mark.parametrize("shown_by", ["lines", "checkpoints"])
def test_an_older_copy_with_others_charges_is_refused(
    tmp_path: Path, z: float, lives: int, shown_by: str
) -> None:
    die_after(3, tmp_path, STATES)
    if lives == 2:
        die_after(3, tmp_path, STATES, again=True)
    ledger = tmp_path / "ledger.json"
    kept = ledger.read_bytes()
    own = lives + 2
    assert rounds_in(ledger) == own
    older_copy(ledger, own - 1, z)
    if shown_by == "checkpoints" and lives == 1:
        for name in ("metrics.jsonl", "operator.jsonl"):
            first = (tmp_path / name).read_text().partition("\n")[0]
            (tmp_path / name).write_text(first + "\n")
    words = (
        f"it holds {own - 1} rounds of this run, and by what else the run left {own} had been "
        "charged"
    )
    with pytest.raises(ConfigError, match=words) as caught:
        resume(tmp_path, STATES)
    assert "\n" not in str(caught.value)
    # No figure of it either.
    told = dead(tmp_path, STATES)
    assert (told["epsilon"], told["rounds_charged"]) == (None, None)
    assert words in told["claim"]
    ledger.write_bytes(kept)
    assert resume(tmp_path, STATES)["privacy"]["rounds_charged"] == own + ROUNDS - 2


@pytest.mark.parametrize("z", [Z, CHEAPER])
def test_a_runs_own_charges_are_not_anothers(tmp_path: Path, z: float) -> None:
    """What the state says it held is compared by run, also where the releases are equal."""
    options = {**STATES, "ledger": str(tmp_path / "spent.json")}
    other_run(tmp_path / "spent.json", 2)
    die_after(2, tmp_path / "run", options)
    content = json.loads((tmp_path / "spent.json").read_text())
    (tmp_path / "spent.json").unlink()
    # Four rounds as before, the last two of them the run's: but the first two were another's.
    other_run(tmp_path / "spent.json", 2, z)
    forged = json.loads((tmp_path / "spent.json").read_text())
    content["charges"][0] = forged["charges"][0]
    (tmp_path / "spent.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="does not begin with what it held when the run left"):
        resume(tmp_path / "run", options)


@pytest.mark.parametrize("state_every", [-1, 0, 1, 2])
def test_an_honest_crash_goes_on_in_a_ledger_that_others_have_charged(
    tmp_path: Path, state_every: int
) -> None:
    """Before it, in between, and twice: whose every round is, is told each time."""
    ledger = tmp_path / "spent.json"
    run = tmp_path / "run"
    options = {**STATES, "state_every": state_every, "ledger": str(ledger)}
    other_run(ledger, 2, Z)
    die_after(3, run, options)
    other_run(ledger, 1, Z)
    other_run(ledger, 1, CHEAPER)
    told = dead(run, options)
    assert (told["rounds_charged"], told["rounds_of_earlier_runs"]) == (3 + 4, 4)
    expected = [(Release(Z, 0.5), 6), (Release(CHEAPER, 0.5), 1)]
    assert told["epsilon"] == pytest.approx(spent(expected, 1e-5).epsilon)
    if not state_every:
        with pytest.raises(ConfigError, match="no whole state to go on from"):
            resume(run, options)
        return
    die_after(4, run, options, again=True)
    other_run(ledger, 2, Z)
    # What a resume does before its first round changes nothing either.
    die_after_nothing(run, options)
    before = rounds_in(ledger)
    summary = resume(run, options)
    done = summary["resumed_after"][-1]
    privacy = summary["privacy"]
    assert privacy["rounds_of_earlier_runs"] == 6
    assert privacy["rounds_charged"] == before + ROUNDS - done == rounds_in(ledger)
    runs = {entry["run"] for entry in json.loads(ledger.read_text())["charges"]}
    assert len(runs) == 5
    assert privacy["run"] in runs


def die_after_nothing(folder: Path, options: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blackthorn.server_app.run._federate", _killed)
        with pytest.raises(Killed):
            resume(folder, options)
    (folder / "summary.json").unlink(missing_ok=True)


def _killed(*_: object) -> None:
    raise Killed


def test_a_round_that_was_charged_and_left_nothing_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Killed between the charge and the first thing that is written of the round."""
    for again in (False, True):
        kill(tmp_path, NOISED, at=2, again=again)
    own = rounds_in(tmp_path / "ledger.json")
    assert own == 3
    assert resume(tmp_path, NOISED)["privacy"]["rounds_charged"] == own + ROUNDS - 1


# What an earlier version left.


def unnamed(content: dict[str, Any]) -> dict[str, Any]:
    """A ledger as an earlier version wrote it: equal releases in a row together, no runs."""
    charges: list[dict[str, Any]] = []
    for entry in content["charges"]:
        bare = {key: value for key, value in entry.items() if key != "run"}
        last = charges[-1] if charges else None
        if last and {**last, "rounds": 0} == {**bare, "rounds": 0}:
            last["rounds"] += bare["rounds"]
        else:
            charges.append(bare)
    return {**content, "charges": charges}


def as_an_earlier_version_left_it(folder: Path, ledger: Path, before: int) -> None:
    """Rewrites state, lines and ledger."""
    ledger.write_text(json.dumps(unnamed(json.loads(ledger.read_text()))))
    saved = state_files.read_saved(folder)
    assert saved is not None
    mark = unnamed(saved.state.values["own"]["ledger"])
    mark = {key: value for key, value in mark.items() if key not in ("run", "charged")}
    held = sum(entry["rounds"] for entry in mark["charges"])
    own = {"rounds_before": before, "rounds_charged": held, "ledger": mark}
    values = {**saved.state.values, "own": own}
    arrays = {name: np.asarray(array) for name, array in saved.state.arrays.items()}
    state = type(saved.state)(saved.state.server_round, arrays, values)
    shutil.rmtree(folder / "state")
    state_files.write_saved(folder, Saved(state, saved.arrays, saved.values, saved.config))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    new = ("run", "rounds_of_earlier_runs")
    bare = [{key: value for key, value in line.items() if key not in new} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bare))


@pytest.mark.parametrize("before", [0, 2])
def test_what_an_earlier_version_left_goes_on(tmp_path: Path, before: int) -> None:
    ledger, run = tmp_path / "spent.json", tmp_path / "run"
    options = {**STATES, "ledger": str(ledger)}
    if before:
        other_run(ledger, before, Z)
    die_after(3, run, options)
    as_an_earlier_version_left_it(run, ledger, before)
    told = dead(run, options)
    assert (told["rounds_charged"], told["rounds_of_earlier_runs"]) == (before + 3, before)
    other_run(ledger, 1, Z)
    die_after(3, run, options, again=True)
    other_run(ledger, 1, Z)
    privacy = resume(run, options)["privacy"]
    assert privacy["rounds_of_earlier_runs"] == before + 2
    assert privacy["rounds_charged"] == before + 2 + 3 + 1 + (ROUNDS - 2) == rounds_in(ledger)


def test_what_an_earlier_version_left_is_checked_by_its_rounds(tmp_path: Path) -> None:
    die_after(3, tmp_path, STATES)
    ledger = tmp_path / "ledger.json"
    as_an_earlier_version_left_it(tmp_path, ledger, 0)
    content = json.loads(ledger.read_text())
    content["rounds"] = content["charges"][0]["rounds"] = 2
    ledger.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"it holds 2 rounds .* left 3 had been charged"):
        resume(tmp_path, STATES)


# Whatever else tells what a run has spent.


def gone(folder: Path) -> None:
    (folder / "ledger.json").unlink()


def damaged(folder: Path) -> None:
    (folder / "ledger.json").write_text("{")


def anothers(folder: Path) -> None:
    gone(folder)
    other_run(folder / "ledger.json", ROUNDS, CHEAPER)


@pytest.mark.parametrize("state_every", [0, 2])
@pytest.mark.parametrize("what", [gone, damaged, anothers])
def test_a_dead_run_has_no_figure_of_a_ledger_that_is_not_its_own(
    tmp_path: Path, what: Callable[[Path], None], state_every: int
) -> None:
    options = {**STATES, "state_every": state_every, "noise_location": "client"}
    die_after(3, tmp_path, options)
    assert dead(tmp_path, options)["epsilon"] is not None
    what(tmp_path)
    told = dead(tmp_path, options)
    assert (told["epsilon"], told["accountant"], told["rounds_charged"]) == (None, None, None)
    assert told["claim"].startswith(f"no figure of ledger {tmp_path / 'ledger.json'}: ")
    assert "\n" not in told["claim"]
    # What the server itself was told is not the ledger's.
    assert told["local"]["epsilon"] > 0


def test_a_dead_run_that_left_nothing_to_know_its_ledger_by_has_no_figure(tmp_path: Path) -> None:
    other_run(tmp_path / "ledger.json", ROUNDS, CHEAPER)
    told = dead(tmp_path, STATES)
    assert told["epsilon"] is None
    assert "nothing that the run left says which ledger it charged" in told["claim"]


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_the_reports_curve_is_the_runs_whatever_its_ledger_has_become(
    tmp_path: Path, neighbours: str
) -> None:
    cohort = {"participation": "fixed", "sample_rate": 1.0, "clients_per_round": 2}
    options = {**NOISED, **cohort, "neighbours": neighbours, "noise_multiplier": 20.0}
    simulate(configuration(tmp_path, **options), Console(quiet=True))
    release = Release(20.0) if neighbours == "zero-out" else Release(10.0, drawn=(2, 4))
    assert read_charges(tmp_path / "ledger.json") == [(release, ROUNDS)]
    anothers(tmp_path)
    curve = spent_by_round(read_record(tmp_path))
    assert curve is not None
    rounds = range(1, ROUNDS + 1)
    expected = [(n, pytest.approx(spent([(release, n)], 1e-5).epsilon)) for n in rounds]
    assert curve.points == expected
    page = write_report(tmp_path).read_text()
    gone(tmp_path)
    assert write_report(tmp_path).read_text() == page


@pytest.mark.parametrize("run", [7, None, "", "0" * 15, "g" * 16, "0" * 16 + "\n", ["0" * 16]])
def test_a_run_is_named_as_runs_are(tmp_path: Path, run: object) -> None:
    other_run(tmp_path / "spent.json", 1, Z)
    content = json.loads((tmp_path / "spent.json").read_text())
    content["charges"][0]["run"] = run
    (tmp_path / "spent.json").write_text(json.dumps(content))
    plan = PrivacyPlan(ClipNorm(1.0), Z, 4, 1, PoissonParticipation(0.5))
    if run == "":
        assert Ledger(plan, tmp_path / "spent.json").rounds == 1
        return
    with pytest.raises(ValueError, match=r"is damaged: ValueError run = "):
        Ledger(plan, tmp_path / "spent.json")
