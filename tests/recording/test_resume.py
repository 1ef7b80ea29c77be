"""A run whose server dies goes on from its last state and ends where it would have ended."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from charged_ledgers import rounds_in
from digits_runs import model, summary_of
from killed_runs import seed_entropy
from resumed_runs import (
    CLAIM,
    KILLED,
    MOMENTS,
    NOISED,
    ROUNDS,
    Moment,
    interrupt,
    killed_copy,
    lines,
    run,
    same_end,
    settings,
)

from blackthorn.recording import run_states
from blackthorn.recording.run_folder import read_metrics
from blackthorn.recording.state_files import FOLDER, read_saved
from blackthorn.settings.catalogue import ALGORITHMS
from blackthorn.strategies.reports import RoundReport

INSECURE = {**NOISED, "insecure_seeded_noise": True}
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
    "the mean of the iterates": {"output_iterate": "uniform-average", "server_momentum": 0.5},
    "their mean by weight": {"output_iterate": "weighted-average", "strong_convexity": 0.5},
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
    "fsgld": {
        **BAYES,
        "algorithm": "fsgld",
        "participation": "with-replacement",
        "clients_per_round": 3,
    },
    "fsgld that fits anew": {
        **BAYES,
        "algorithm": "fsgld",
        "algorithm_options": 'surrogate = "linear", refit-every = 2',
    },
    "sghmc": {**BAYES, "algorithm": "sghmc", "local_lr": 0.002},
    "psgld": {
        **BAYES,
        "algorithm": "psgld",
        "algorithm_options": "warm-up = 2",
        "burn_in": 2,
        "participation": "with-replacement",
        "clients_per_round": 3,
    },
    "cyclical steps": {
        **BAYES,
        "step_size": "cyclical",
        "cycle_rounds": 2,
        "burn_in": 2,
        "thinning": 2,
    },
    "biclip": {"algorithm": "biclip", "algorithm_options": "high = 0.1, server-high = 0.01"},
    "error-feedback": {"algorithm": "error-feedback", "clip_norm": 0.5},
    "dp-fedavg": {"algorithm": "dp-fedavg", **INSECURE, "server_momentum": 0.5},
    "dp-normfedavg": {
        "algorithm": "dp-normfedavg",
        **INSECURE,
        "participation": "poisson",
        "sample_rate": 0.5,
    },
    "clients in turn": {
        "algorithm": "dp-fedavg",
        **INSECURE,
        "participation": "rotating",
        "bands": 3,
        "server_momentum": 0.5,
    },
    "a threshold that moves": {
        "algorithm": "dp-fedavg",
        **INSECURE,
        "noise_multiplier": 0.3,
        "clip_quantile": 0.5,
    },
    "noise at the clients": {"algorithm": "dp-fedavg", **INSECURE, "noise_location": "client"},
    "secure aggregation": {"algorithm": "secure-dp-fedavg", **INSECURE},
    "private ce-fedavg": {"algorithm": "ce-fedavg", **INSECURE},
}


def test_every_algorithm_is_among_the_runs() -> None:
    named = {str(options.get("algorithm", "gfedavg")) for options in RUNS.values()}
    assert named == set(ALGORITHMS)


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
def test_a_run_ends_the_same_whenever_it_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: Moment, every: int
) -> None:
    options: dict[str, Any] = {**BAYES, "state_every": every, "max_samples": 3}
    whole, dead = killed_copy(monkeypatch, tmp_path, moment, after=4, **options)
    run(settings(dead, resume=str(dead), **options))
    same_end(whole, dead)
    last = 4 - every if moment == "before the state" else 4
    assert summary_of(dead)["resumed_after"] == [last]


def test_a_run_that_dies_in_its_first_round_and_again_ends_the_same(
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
        run(settings(dead, state_every=-1), [interrupt])
    run(settings(dead, state_every=-1, resume=str(dead)))
    same_end(whole, dead)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_ledger_survives_and_the_spending_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: Moment
) -> None:
    """A round that was charged and not yet on record is charged once more, never less."""
    seed_entropy(monkeypatch)
    options: dict[str, Any] = {"algorithm": "dp-normfedavg", **CLAIM}
    whole, dead = killed_copy(monkeypatch, tmp_path, moment, **options)
    run(settings(dead, resume=str(dead), **options))
    np.testing.assert_array_equal(model(whole), model(dead))
    held = [rounds_in(folder / "ledger.json") for folder in (whole, dead)]
    assert held == [ROUNDS, ROUNDS + (moment == "before the state")]
    for folder, rounds in zip((whole, dead), held, strict=True):
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
