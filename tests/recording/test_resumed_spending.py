"""What a run that was killed and resumed has spent: no less than it released, of nobody else."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from charged_ledgers import read_charges, rounds_in
from digits_runs import SAMPLE, configuration
from killed_runs import (
    NOISED,
    ROUNDS,
    Killed,
    die_after,
    kill,
    other_run,
    put_back,
    resume,
    start,
)
from rich.console import Console

from blackthorn.launch.commands.cluster import deployed
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.line_log import LineLog
from blackthorn.recording.privacy import privacy_of_dead_run
from blackthorn.recording.run_folder import read_metrics
from blackthorn.recording.run_states import RunStates
from blackthorn.settings.config import ConfigError
from blackthorn.settings.rounding import upward
from blackthorn.strategies import (
    ClipNorm,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
    Release,
    spent,
)
from blackthorn.strategies.reports import RoundReport

# Never less than was released.


def test_a_round_that_is_done_again_is_charged_again(tmp_path: Path) -> None:
    """Dies with a resume that skips the charges of redone rounds."""
    kill(tmp_path, NOISED, at=3)
    kill(tmp_path, NOISED, at=4, again=True)
    summary = resume(tmp_path, NOISED)
    # Five rounds, of which the third and the fourth were done twice.
    assert read_charges(tmp_path / "ledger.json") == [(Release(2.0, 0.5), ROUNDS + 2)]
    expected = spent([(Release(2.0, 0.5), ROUNDS + 2)], 1e-5).epsilon
    assert summary["privacy"]["epsilon"] == pytest.approx(expected)
    assert [e["rounds_charged"] for e in read_metrics(tmp_path)] == [0, 1, 2, 4, 6, 7]


def test_what_a_run_that_died_has_spent_is_told_when_it_goes_on(tmp_path: Path) -> None:
    """It left no summary; its ledger holds three rounds, and later runs are told of all."""
    kill(tmp_path, NOISED, at=3)
    said = io.StringIO()
    resume(tmp_path, NOISED, Console(file=said, width=500))
    epsilon = spent([(Release(2.0, 0.5), 3)], 1e-5).epsilon
    line = f"spent so far, by its ledger: epsilon {upward(epsilon, 4)} at delta 1e-05 (3 rounds)"
    assert line in said.getvalue().splitlines()
    again, new = io.StringIO(), tmp_path / "new"
    options = {**NOISED, "ledger": str(tmp_path / "ledger.json")}
    start(new, options, Console(file=again, width=500))
    assert f"({ROUNDS + 1} rounds)" in again.getvalue()
    third = io.StringIO()
    start(tmp_path / "other", NOISED, Console(file=third, width=500))
    assert "spent so far" not in third.getvalue()


def lost(folder: Path) -> None:
    (folder / "ledger.json").unlink()


def older(folder: Path) -> None:
    put_back(folder / "ledger.json", 3)


def without_lines(folder: Path) -> None:
    """The checkpoints alone are left to say what was released."""
    older(folder)
    for name in ("metrics.jsonl", "operator.jsonl"):
        (folder / name).write_text((folder / name).read_text().partition("\n")[0] + "\n")


def without_checkpoints(folder: Path) -> None:
    older(folder)
    shutil.rmtree(folder / "checkpoints")


@pytest.mark.parametrize("what", [lost, older, without_lines, without_checkpoints])
def test_a_ledger_lost_since_the_last_state_is_refused(
    tmp_path: Path, what: Callable[[Path], None]
) -> None:
    """The state is of round 3, four models were released, and the ledger says three."""
    options = {**NOISED, "state_every": 3, "checkpoint_every": 1}
    die_after(4, tmp_path, options)
    what(tmp_path)
    with pytest.raises(
        ConfigError, match=r"by what else the run left 4 had been charged"
    ) as caught:
        resume(tmp_path, options)
    assert "\n" not in str(caught.value)


def test_what_was_lost_is_remembered_when_the_lines_are_cut(tmp_path: Path) -> None:
    """A resumed run cuts its lines back to its state: the ledger must still hold what they said."""
    options = {**NOISED, "state_every": 4}
    die_after(3, tmp_path, options)
    die_after(1, tmp_path, options, again=True)
    assert [entry["round"] for entry in read_metrics(tmp_path)] == [0, 1]
    assert rounds_in(tmp_path / "ledger.json") == 4
    put_back(tmp_path / "ledger.json", 2)
    with pytest.raises(ConfigError, match="holds 2 rounds"):
        resume(tmp_path, options)


def test_a_copied_run_is_not_resumed_beside_the_first(tmp_path: Path) -> None:
    kill(tmp_path / "one", NOISED, at=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    resume(tmp_path / "one", NOISED)
    with pytest.raises(ConfigError, match=r"is a copy of .*one/ledger\.json, which is still there"):
        resume(tmp_path / "two", NOISED)
    # With a ledger outside of them, both copies charge the same one.
    shared = {**NOISED, "ledger": str(tmp_path / "shared.json")}
    kill(tmp_path / "three", shared, at=2)
    shutil.copytree(tmp_path / "three", tmp_path / "four")
    first = resume(tmp_path / "three", shared)["privacy"]
    second = resume(tmp_path / "four", shared)["privacy"]
    assert first["rounds_charged"] == ROUNDS + 1
    assert second["rounds_charged"] == ROUNDS + 1 + (ROUNDS - 1)


SAMPLED: dict[str, Any] = {**SAMPLE, "num_server_rounds": ROUNDS, "state_every": 1}

AT_CLIENTS = {**NOISED, "noise_location": "client", "aggregator": "median"}


@pytest.mark.parametrize("options", [SAMPLED, AT_CLIENTS], ids=["examples", "at the clients"])
@pytest.mark.parametrize("original", ["went on", "stands still"])
def test_a_copied_run_is_not_resumed_beside_the_first_where_no_ledger_counts(
    tmp_path: Path, options: dict[str, Any], original: str
) -> None:
    kill(tmp_path / "one", options, at=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert not list(tmp_path.rglob("ledger.json"))
    if original == "went on":
        resume(tmp_path / "one", options)
    with pytest.raises(ConfigError, match=r"two is not allowed .*: it is a copy of .*/one, which"):
        resume(tmp_path / "two", options)
    # Another run in that place is no original.
    shutil.rmtree(tmp_path / "one")
    start(tmp_path / "one", {**options, "seed": 1})
    (warning,) = [
        line for line in resume(tmp_path / "two", options)["warnings"] if "before" in line
    ]
    assert warning.startswith("the run was elsewhere before (one); if it goes on there as well")


@pytest.mark.parametrize("original", ["went on", "stands still"])
def test_nor_a_copy_from_before_the_first_state(
    tmp_path: Path, original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before a state was due; its first line is that of round 0."""
    monkeypatch.setattr(RunStates, "at_stop", lambda _: None)  # as by SIGKILL
    options = {**AT_CLIENTS, "state_every": ROUNDS + 1}
    die_after(2, tmp_path / "one", options)
    assert [line["round"] for line in read_metrics(tmp_path / "one")] == [0, 1, 2]
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    if original == "went on":
        die_after(3, tmp_path / "one", options, again=True)
    with pytest.raises(ConfigError, match=r"two is not allowed .*: it is a copy of .*/one, which"):
        resume(tmp_path / "two", options)


def test_a_run_that_was_moved_goes_on_and_says_where_it_was(tmp_path: Path) -> None:
    for name, options in (("example", SAMPLED), ("client", NOISED)):
        kill(tmp_path / name, options, at=2)
        (tmp_path / name).rename(tmp_path / f"{name}-moved")
        warnings = resume(tmp_path / f"{name}-moved", options)["warnings"]
        assert [line for line in warnings if "before" in line]
        assert not [line for line in warnings if str(tmp_path) in line]


# What the clients have said to the server.


class Asked:
    """Observer that counts the rounds in which clients were asked, over all of a run's lives."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, report: RoundReport) -> None:
        self.times += report.server_round > 0


DEATHS = 5


def again_and_again(
    folder: Path, options: dict[str, Any], at_death: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], int]:
    """A run that dies DEATHS times after round 4, with states of every third, and then goes on to
    its end: its summary, and how often clients were asked."""
    asked = Asked()

    def die(report: RoundReport) -> None:
        if report.server_round == 4:
            raise Killed

    options = {**options, "state_every": 3, "checkpoint_every": 0}
    for resumed in ({}, *(DEATHS - 1) * [{"resume": str(folder)}]):
        config = configuration(folder, **options, **resumed)
        with pytest.raises(Killed):
            simulate(config, Console(quiet=True), observers=[asked, die])
        (folder / "summary.json").unlink()
        at_death()
    config = configuration(folder, **options, resume=str(folder))
    return simulate(config, Console(quiet=True), observers=[asked]), asked.times


def check_local(summary: dict[str, Any], asked: int) -> None:
    assert asked == ROUNDS + DEATHS
    local = summary["privacy"]["local"]
    # A round may have been under way each time that it died: at most one more.
    assert asked <= local["rounds"] <= asked + DEATHS
    # Four clients share the noise, and a message moves by 2C: z / (2 √4).
    expected = spent([(Release(0.5), local["rounds"])], 1e-5).epsilon
    assert local["epsilon"] == pytest.approx(expected)


LOCAL = {**NOISED, "noise_location": "client", "participation": "full", "sample_rate": 1.0}


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_the_local_figure_counts_what_was_done_again(tmp_path: Path, rule: str) -> None:
    """The server has had a message of every time: also under a robust rule, without a ledger."""
    check_local(*again_and_again(tmp_path, {**LOCAL, "aggregator": rule}))


def test_the_local_figure_counts_what_a_power_failure_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the lines only what had been written through to the disk is there afterwards."""
    durable: dict[Path, int] = {}
    real = LineLog.sync

    def sync(log: LineLog) -> None:
        real(log)
        durable[log.path] = log.path.stat().st_size

    def fail() -> None:
        for path, size in durable.items():
            os.truncate(path, size)

    monkeypatch.setattr(LineLog, "sync", sync)
    check_local(*again_and_again(tmp_path, LOCAL, fail))


def test_the_figure_of_an_example_counts_what_was_done_again(tmp_path: Path) -> None:
    options = {"algorithm": "gfedavg", "num_server_rounds": ROUNDS, "instruments": False}
    dp_sgd = {"local_dp_sgd": True, "dp_sgd_noise_multiplier": 2.0, "dp_sgd_sample_rate": 0.2}
    _, asked = again_and_again(tmp_path, {**options, **dp_sgd, "batch_size": 10})
    assert asked == ROUNDS + DEATHS
    told = max(read_metrics(tmp_path)[-1]["sample_epsilon"].values())
    # Four local steps a round.
    least, most = (
        spent([(Release(2.0, 0.2), 4 * rounds)], 1e-5).epsilon for rounds in (asked, asked + DEATHS)
    )
    assert 0.999 * least <= told <= 1.001 * most


# Of nobody else.


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("before", [0, 3])
def test_a_run_is_no_earlier_run_of_its_own(tmp_path: Path, at: int, before: int) -> None:
    """Dies with a rounds_before that is wrong by one, or counts the run itself."""
    options = {**NOISED, "ledger": str(tmp_path / "spent.json")}
    if before:
        other_run(tmp_path / "spent.json", before)
    kill(tmp_path / "run", options, at=at)
    config = configuration(tmp_path / "run", **options)
    dead = privacy_of_dead_run(config, tmp_path / "run")
    assert dead is not None
    assert (dead["rounds_charged"], dead["rounds_of_earlier_runs"]) == (before + at, before)
    summary = resume(tmp_path / "run", options)
    assert summary["privacy"]["rounds_of_earlier_runs"] == before
    assert summary["privacy"]["rounds_charged"] == before + ROUNDS + 1
    after = start(tmp_path / "next", options)
    assert after["privacy"]["rounds_of_earlier_runs"] == before + ROUNDS + 1


def test_a_dead_run_without_states_is_no_earlier_run_of_its_own(tmp_path: Path) -> None:
    options = {**NOISED, "state_every": 0}
    start(tmp_path, options)
    dead = privacy_of_dead_run(configuration(tmp_path, **options), tmp_path)
    assert dead is not None
    assert (dead["rounds_charged"], dead["rounds_of_earlier_runs"]) == (ROUNDS, 0)


# Who has it.


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "checkpoints/final.safetensors"])
def test_a_ledger_where_the_run_writes_other_files_is_refused(tmp_path: Path, name: str) -> None:
    """It would be charged, and then be written over."""
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="the run writes files of its own in") as caught:
        start(folder, {**NOISED, "ledger": str(folder / name)})
    assert "\n" not in str(caught.value)
    assert not folder.exists()
    start(folder, {**NOISED, "ledger": str(folder / "ledger.json")})
    assert rounds_in(folder / "ledger.json") == ROUNDS


def test_a_ledger_in_use_is_known_before_anything_starts(tmp_path: Path) -> None:
    ledger = tmp_path / "spent.json"
    other_run(ledger, 1)
    plan = PrivacyPlan(ClipNorm(1.0), 2.0, 4, 5, PoissonParticipation(0.5))
    holder = Ledger(plan, ledger)
    holder.charge(plan.release())
    with pytest.raises(ConfigError, match=f"ledger {ledger} is in use by another run"):
        start(tmp_path / "run", {**NOISED, "ledger": str(ledger)})
    holder.close()
    assert not (tmp_path / "run").exists()


def test_where_no_ledger_can_be_is_known_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"ledger = .*file/spent\.json is not allowed") as caught:
        start(tmp_path / "run", {**NOISED, "ledger": str(tmp_path / "file" / "spent.json")})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_clusters_server_app_has_the_ledger_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in a folder of its own, where a relative path would begin another."""
    monkeypatch.chdir(tmp_path)
    config = configuration(tmp_path / "run", **NOISED, ledger="spent.json")
    assert deployed(config, ()).ledger == str(tmp_path / "spent.json")
    assert deployed(configuration(tmp_path / "run", **NOISED), ()).ledger == ""
