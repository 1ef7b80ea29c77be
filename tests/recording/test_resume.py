"""A run whose server dies goes on from its last state and ends where it would have ended.

The run folder is copied while an uninterrupted run is under way: the copy is what is left when
the server is killed at that instant.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_runs import configuration, model, summary_of
from real_deployment import COMMAND
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.launch.commands.simulate import simulate
from blackthorn.randomness import Stream
from blackthorn.recording import run_states
from blackthorn.recording.line_log import LineLog
from blackthorn.recording.run_folder import read_metrics
from blackthorn.recording.state_files import FOLDER, Saved, read_saved
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig, make_config, read_recipe
from blackthorn.strategies.entropy import SeededRandomness
from blackthorn.strategies.ledger import read_charges
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.reports import RoundReport

ROUNDS, KILLED = 6, 3

Moment = str
MOMENTS = ("before the state", "after the state", "after the round")

SMALL = {
    "num_server_rounds": ROUNDS,
    "batch_size": 8,
    "local_lr": 0.05,
    "checkpoint_every": 2,
    "state_every": 1,
}
NOISED = {"noise_multiplier": 0.7, "clip_norm": 2.0, "instruments": False}
INSECURE = {**NOISED, "insecure_seeded_noise": True}
CLAIM = {**NOISED, "participation": "poisson", "sample_rate": 0.5}
BAYES = {
    "task": "bayes-linear",
    "algorithm": "fa-ld",
    "partition": "iid",
    "model": "auto",
    "instruments": False,
    "local_lr": 0.001,
    "burn_in": 1,
    "max_samples": 2,
    "keep_samples": "reservoir",
    "langevin_seed": 5,
}

RUNS: dict[str, dict[str, Any]] = {
    "momentum, sampling, a plateau and the best iterate": {
        "server_momentum": 0.9,
        "participation": "fixed",
        "clients_per_round": 2,
        "local_lr_decay": 0.5,
        "local_lr_decay_when": "plateau",
        "output_iterate": "best",
    },
    "a uniform iterate": {"output_iterate": "uniform", "seed": 3},
    "a random iterate by weight": {
        "output_iterate": "random-weighted",
        "strong_convexity": 0.5,
        "local_lr_decay": 0.9,
    },
    "fat-clipping-pr": {"algorithm": "fat-clipping-pr", "clip_norm": 0.5},
    "fat-clipping-pi": {"algorithm": "fat-clipping-pi", "clip_norm": 0.5},
    "ce-fedavg": {"algorithm": "ce-fedavg", "clip_norm": 0.02, "server_momentum": 0.5},
    "model-clipping": {"algorithm": "model-clipping", "clip_norm": 1.0},
    "rage against a set that changes": {
        "algorithm": "rage",
        "num_clients": 5,
        "num_corrupt": 1,
        "num_byzantine": 1,
        "byzantine_set": "redrawn",
        "attack": "random-gradient",
        "rage_coordinates": 20,
    },
    "bucketing": {
        "num_clients": 6,
        "aggregator": "median",
        "pre_aggregator": "bucketing",
        "num_corrupt": 1,
    },
    "too few replies now and then": {
        # Two answer in four of the six rounds.
        "seed": 5,
        "num_byzantine": 2,
        "byzantine_set": "redrawn",
        "attack": "raise",
        "participation": "fixed",
        "clients_per_round": 2,
        "min_replies": 2,
        "below_quorum": "fail",
        "fail_after": 6,
    },
    "oversampling": {
        "num_clients": 6,
        "participation": "fixed",
        "clients_per_round": 2,
        "oversample": 2.0,
    },
    "fa-ld": BAYES,
    "fa-ld, scheme II": {**BAYES, "participation": "fixed", "clients_per_round": 2},
    "fa-ld, scheme I": {**BAYES, "participation": "with-replacement", "clients_per_round": 3},
    "dp-fedavg": {"algorithm": "dp-fedavg", **INSECURE, "server_momentum": 0.5},
    "dp-normfedavg": {
        "algorithm": "dp-normfedavg",
        **INSECURE,
        "participation": "poisson",
        "sample_rate": 0.5,
    },
    "noise at the clients": {"algorithm": "dp-fedavg", **INSECURE, "noise_location": "client"},
    "private ce-fedavg": {"algorithm": "ce-fedavg", **INSECURE},
}


def settings(folder: Path, **options: Any) -> RunConfig:
    return configuration(folder, **{**SMALL, **options})


def run(config: RunConfig, observers: Sequence[Callable[[RoundReport], None]] = ()) -> None:
    simulate(config, Console(quiet=True), observers=observers)


def killed_copy(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    moment: Moment = "after the round",
    after: int = KILLED,
    **options: Any,
) -> tuple[Path, Path]:
    """An uninterrupted run's folder, and what it was at the `moment` of round `after`."""
    whole, dead = tmp_path / "whole", tmp_path / "dead"

    def copy() -> None:
        shutil.copytree(whole, dead)

    real = run_states.write_saved

    def write(path: Path, saved: Saved) -> None:
        it_is_time = saved.state.server_round == after
        if it_is_time and moment == "before the state":
            copy()
        real(path, saved)
        if it_is_time and moment == "after the state":
            copy()

    def see(report: RoundReport) -> None:
        if report.server_round == after and moment == "after the round":
            copy()

    with monkeypatch.context() as patch:
        patch.setattr(run_states, "write_saved", write)
        run(settings(whole, **options), [see])
    assert dead.exists()
    if (dead / "ledger.json").exists():
        # The copy of a ledger is not continued beside its original.
        whole = whole.rename(tmp_path / "ended")
    return whole, dead


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file, apart from times."""
    path = folder / name
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def same_end(one: Path, other: Path) -> None:
    """Bit for bit the same models and samples, and the same lines."""
    for pattern in ("checkpoints/*", "posterior/slot-*"):
        names = sorted(path.relative_to(one) for path in one.glob(pattern))
        assert names == sorted(path.relative_to(other) for path in other.glob(pattern))
        for path in names:
            states = load_file(one / path), load_file(other / path)
            for key, value in states[0].items():
                np.testing.assert_array_equal(value, states[1][key], strict=True)
    for name in ("metrics.jsonl", "operator.jsonl", "clients.jsonl"):
        assert lines(one, name) == lines(other, name)
    apart = {"wall_seconds", "resumed_after"}
    ends = [{k: v for k, v in summary_of(f).items() if k not in apart} for f in (one, other)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_every_system_ends_where_it_would_have_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, dead = killed_copy(monkeypatch, tmp_path, **options)
    assert read_metrics(dead)[-1]["round"] == KILLED
    run(settings(dead, resume=str(dead), **options))
    same_end(whole, dead)
    assert summary_of(dead)["status"] == "completed"
    assert summary_of(whole)["resumed_after"] == []
    assert summary_of(dead)["resumed_after"] == [KILLED]
    assert not (dead / FOLDER).exists()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("every", [1, 2])
def test_whenever_it_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: Moment, every: int
) -> None:
    options: dict[str, Any] = {**BAYES, "state_every": every, "max_samples": 3}
    whole, dead = killed_copy(monkeypatch, tmp_path, moment, after=4, **options)
    run(settings(dead, resume=str(dead), **options))
    same_end(whole, dead)
    last = 4 - every if moment == "before the state" else 4
    assert summary_of(dead)["resumed_after"] == [last]


def test_it_dies_in_the_first_round_and_again_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, dead = killed_copy(monkeypatch, tmp_path, "before the state", after=1)
    assert [entry["round"] for entry in read_metrics(dead)] == [0]
    again = tmp_path / "again"

    def copy(report: RoundReport) -> None:
        if report.server_round == 4:
            shutil.copytree(dead, again)

    run(settings(dead, resume=str(dead)), [copy])
    run(settings(again, resume=str(again)))
    same_end(whole, dead)
    same_end(whole, again)
    assert summary_of(again)["resumed_after"] == [0, 4]


def test_a_run_that_failed_goes_on_too(tmp_path: Path) -> None:
    class Cut(Exception):
        pass

    def cut(report: RoundReport) -> None:
        if report.server_round == KILLED:
            raise Cut("no more power")

    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with pytest.raises(Cut):
        run(settings(broken), [cut])
    assert summary_of(broken)["status"] == "failed"
    run(settings(broken, resume=str(broken)))
    run(settings(whole))
    same_end(whole, broken)


def test_states_not_in_every_round_are_cut_back_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rounds 3 and 4 are done once more; a torn line is none."""
    options: dict[str, Any] = {"state_every": 2}
    whole, dead = killed_copy(monkeypatch, tmp_path, after=KILLED, **options)
    with (dead / "metrics.jsonl").open("a") as stream:
        stream.write('{"round": 4, "accu')
    run(settings(dead, resume=str(dead), **options))
    same_end(whole, dead)
    assert summary_of(dead)["resumed_after"] == [2]


def test_the_seed_of_the_shared_noise_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without langevin-seed it is the operating system's, drawn once a run."""
    options: dict[str, Any] = {**BAYES, "langevin_seed": -1, "shared_noise": 0.5}
    _, dead = killed_copy(monkeypatch, tmp_path, **options)
    seeds = [_shared_seed(dead)]

    def look(report: RoundReport) -> None:
        if report.server_round == ROUNDS - 1:
            seeds.append(_shared_seed(dead))

    run(settings(dead, resume=str(dead), **options), [look])
    assert len(seeds) == 2
    assert seeds[0] == seeds[1]


def _shared_seed(folder: Path) -> int:
    saved = read_saved(folder)
    assert saved is not None
    return int(saved.state.values["own"]["shared_seed"])


def test_by_default_states_are_so_far_apart_that_they_cost_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Quick rounds share one, slow rounds have one each unless states themselves are slow; the run
    goes on from the last."""

    def states(folder: Path, seconds: float, share: float = 1e9) -> set[str]:
        monkeypatch.setattr(run_states, "STATE_SECONDS", seconds)
        monkeypatch.setattr(run_states, "STATE_SHARE", share)
        seen: set[str] = set()

        def look(report: RoundReport) -> None:
            del report
            seen.update(path.name[:11] for path in (folder / FOLDER).iterdir())

        run(settings(folder, state_every=-1), [look])
        return seen

    assert states(tmp_path / "quick", 600.0) == {"round-00000"}
    assert states(tmp_path / "costly", 0.0, 1e-9) == {"round-00000", "round-00001"}
    assert len(states(tmp_path / "slow", 0.0)) == ROUNDS + 1
    whole, dead = tmp_path / "slow", tmp_path / "dead"
    with pytest.raises(KeyboardInterrupt):
        run(settings(dead, state_every=-1), [_interrupt])
    run(settings(dead, state_every=-1, resume=str(dead)))
    same_end(whole, dead)


def _interrupt(report: RoundReport) -> None:
    if report.server_round == KILLED:
        raise KeyboardInterrupt


# Privacy.


@pytest.fixture
def seeded_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the operating system's entropy, so that two runs can be compared."""

    def randomness(strategy: object, server_round: int, stream: Stream) -> SeededRandomness:
        del strategy
        return SeededRandomness(stream, 11, server_round)

    monkeypatch.setattr(PrivateAveraging, "_randomness", randomness)


@pytest.mark.usefixtures("seeded_entropy")
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_ledger_survives_and_the_spending_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: Moment
) -> None:
    """A round that was charged and not yet on record is charged once more, never less."""
    options: dict[str, Any] = {"algorithm": "dp-normfedavg", **CLAIM}
    whole, dead = killed_copy(monkeypatch, tmp_path, moment, **options)
    run(settings(dead, resume=str(dead), **options))
    np.testing.assert_array_equal(model(whole), model(dead))
    charged = [sum(n for _, n in read_charges(f / "ledger.json")) for f in (whole, dead)]
    assert charged == [ROUNDS, ROUNDS + (moment == "before the state")]
    for folder, rounds in zip((whole, dead), charged, strict=True):
        assert summary_of(folder)["privacy"]["rounds_charged"] == rounds
        assert summary_of(folder)["privacy"]["rounds_of_earlier_runs"] == 0
    if moment != "before the state":
        assert ledger(whole) == ledger(dead)
        same_end(whole, dead)
    assert not lines(dead, "clients.jsonl")
    assert len(lines(dead, "operator.jsonl")) == ROUNDS + 1


def ledger(folder: Path) -> dict[str, Any]:
    """The ledger apart from where it is."""
    content = json.loads((folder / "ledger.json").read_text())
    return {key: value for key, value in content.items() if key != "path"}


def test_a_resumed_run_keeps_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is left after the kill pays for fewer rounds than were planned."""
    options: dict[str, Any] = {"algorithm": "dp-fedavg", **CLAIM}
    whole, dead = killed_copy(monkeypatch, tmp_path, "before the state", **options)
    limit = summary_of(whole)["privacy"]["epsilon"]
    assert limit is not None
    budget = {**options, "max_epsilon": 1.001 * limit}
    shutil.rmtree(whole)
    shutil.rmtree(dead)
    _, dead = killed_copy(monkeypatch, tmp_path, "before the state", **budget)
    run(settings(dead, resume=str(dead), **budget))
    assert summary_of(dead)["privacy"]["epsilon"] <= 1.001 * limit
    assert summary_of(dead)["privacy"]["rounds_charged"] == ROUNDS
    assert summary_of(dead)["rounds_completed"] == ROUNDS - 1


@pytest.mark.parametrize("older", [None, 1], ids=["missing", "older"])
def test_a_ledger_that_is_behind_the_state_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, older: int | None
) -> None:
    """Going on with it would claim less than the run's models have cost."""
    options: dict[str, Any] = {"algorithm": "dp-fedavg", **CLAIM}
    _, dead = killed_copy(monkeypatch, tmp_path, "before the state", **options)
    ledger = dead / "ledger.json"
    if older is None:
        ledger.unlink()
    else:
        content = json.loads(ledger.read_text())
        content["rounds"] = content["charges"][0]["rounds"] = older
        ledger.write_text(json.dumps(content))
    refused(
        dead, rf"holds {older or 0} rounds of this run, and by what else the run left \d", **options
    )


# Damage.


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_a_torn_state_is_told_and_the_one_before_is_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    whole, dead = killed_copy(monkeypatch, tmp_path)
    before, newest = sorted((dead / FOLDER).iterdir())
    damage(newest)
    simulate(settings(dead, resume=str(dead)), Console(width=500))
    assert (
        f"the run goes on after round {KILLED - 1}, since {newest.name} cannot be used: damaged"
        in capsys.readouterr().out
    )
    same_end(whole, dead)
    assert summary_of(dead)["resumed_after"] == [KILLED - 1]
    assert before.name.startswith(f"round-0000{KILLED - 1}-")


def test_without_a_whole_state_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, dead = killed_copy(monkeypatch, tmp_path)
    for path in (dead / FOLDER).iterdir():
        flip_a_bit(path)
    refused(dead, "there is no whole state to go on from")
    shutil.rmtree(dead / FOLDER)
    refused(dead, "there is no whole state to go on from")


def test_half_a_state_never_takes_the_place_of_one(tmp_path: Path) -> None:
    """A kill while a state is written leaves its beginning under another name."""
    dead = tmp_path / "dead"

    with pytest.raises(KeyboardInterrupt):
        run(settings(dead), [_interrupt])
    half = sorted((dead / FOLDER).iterdir())[-1]
    half.rename(half.with_name(f".{half.name}.part"))
    saved = read_saved(dead)
    assert saved is not None
    assert (saved.state.server_round, saved.damaged) == (KILLED - 1, ())


# What is refused, in one line.


def refused(folder: Path, words: str, **options: Any) -> str:
    """Resuming is refused with `words` in one line, and changes nothing."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(settings(folder, **{"resume": str(folder), **options}))
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(("resume = ", "output-dir = "))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return said


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its third round."""
    with pytest.MonkeyPatch.context() as patch:
        return killed_copy(patch, tmp_path_factory.mktemp("runs"))[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_lr": 0.1}, r"local-lr = 0\.1 \(was 0\.05\)"),
        ({"seed": 1, "num_clients": 5}, r"num-clients = 5 \(was 4\).*seed = 1 \(was 0\)"),
        ({"num_server_rounds": ROUNDS - 1}, r"num-server-rounds = 5 \(was 6, no fewer\)"),
        ({"instruments": False}, "instruments = False"),
        ({"min_replies": 2}, "min-replies = 2"),
    ],
)
def test_what_a_run_computes_cannot_change_under_way(
    died: Path, options: dict[str, Any], words: str
) -> None:
    said = refused(died, words, **options)
    assert "is not allowed with another configuration" in said


def test_more_rounds_and_other_deadlines_are_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, dead = killed_copy(monkeypatch, tmp_path)
    longer = {"num_server_rounds": ROUNDS + 2}
    other = {**longer, "round_timeout": 7.0, "start_timeout": 8.0, "checkpoint_every": 0}
    run(settings(dead, resume=str(dead), **other))
    run(settings(tmp_path / "at once", **longer))
    np.testing.assert_array_equal(model(dead), model(tmp_path / "at once"))
    assert summary_of(dead)["rounds_completed"] == ROUNDS + 2


@pytest.mark.parametrize(
    "options",
    [
        {"output_iterate": "uniform"},
        {"algorithm": "dp-fedavg", **CLAIM, "noise_multiplier": 0.0, "epsilon": 50.0},
    ],
)
def test_rounds_that_something_was_drawn_or_calibrated_for_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    _, dead = killed_copy(monkeypatch, tmp_path, **options)
    more = {**options, "num_server_rounds": ROUNDS + 1}
    refused(dead, r"num-server-rounds = 7 \(was 6, which .* fixed\)", **more)


def test_no_run_another_folder_and_a_run_without_states(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert "there is no run" in refused(nowhere, "there is no run")
    refused(nowhere, "there is no run", output_dir=str(tmp_path))
    refused(nowhere, "File name too long", resume="x" * 300, output_dir="")

    with pytest.raises(KeyboardInterrupt):
        run(settings(nowhere, state_every=0), [_interrupt])
    refused(nowhere, "state-every = 0", state_every=0)
    own = f"the run goes on in its own folder; set output-dir = {nowhere}"
    refused(nowhere, own, state_every=0, output_dir=str(tmp_path))


def test_a_run_that_has_not_ended(died: Path) -> None:
    log = LineLog(died / "metrics.jsonl", alone=True)
    try:
        refused(died, "the folder is in use by a run that has not ended")
    finally:
        log.close()


def test_a_run_that_is_completed_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    run(settings(tmp_path / "run", num_server_rounds=1))
    refused(tmp_path / "run", r"the run is completed \(1 rounds\)")
    recipe = tmp_path / "run" / "config.toml"
    done = subprocess.run(
        [*COMMAND, "simulate", str(recipe), "--set", f"resume={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: resume = {tmp_path / 'run'} is not allowed: the run is completed (1 rounds)"
    ]


def test_the_recipe_that_a_run_leaves_is_enough_to_go_on(died: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(died, folder)
    recipe = {**read_recipe(folder / "config.toml"), "output-dir": "", "resume": str(folder)}
    run(make_config(recipe))
    assert summary_of(folder)["rounds_completed"] == ROUNDS
