"""Clients that train by a recipe's own loop, or by ours over a project of somebody's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from digits_runs import summary_of
from safetensors.torch import load_file
from trainer_project import configured, digits, entries, project, trained

from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.policy import Policy
from blackthorn.recording.client_history import read_lines
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError

State = dict[str, torch.Tensor]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return project(tmp_path)


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("options", [{}, {"algorithm": "rage", "num-corrupt": 0}])
def test_our_sgd_written_as_a_trainer_is_our_sgd_bit_for_bit(
    options: dict[str, Any], file: Path, tmp_path: Path
) -> None:
    for name, values in (("digits", digits()), ("project", {})):
        values = {**values, **options}
        ours = trained(file, tmp_path / f"{name}-ours", **values)
        theirs = trained(file, tmp_path / f"{name}-theirs", **values, trainer=":sgd")
        assert equal(ours, theirs), name


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"algorithm": "fat-clipping-pi", "clip-norm": 0.1}, ":wrapped"),
        ({"algorithm": "fat-clipping-pi", "clip-norm": 0.1}, ":of_the_round"),
        ({"algorithm": "fat-clipping-pr", "clip-norm": 0.1}, ":sgd"),
        ({"algorithm": "ce-fedavg", "clip-norm": 0.1}, ":sgd"),
        ({"algorithm": "error-feedback", "clip-norm": 0.1}, ":sgd"),
        (
            {"algorithm": "dp-fedavg", "clip-norm": 0.1, "noise-multiplier": 1.0}
            | {"noise-location": "client", "insecure-seeded-noise": True},
            ":sgd",
        ),
        (
            {"algorithm": "fa-ld", "langevin-seed": 3, "prior-precision": 1.0, "local-lr": 1e-4}
            | {"max-samples": 2},
            ":of_the_round",
        ),
    ],
)
def test_every_algorithm_does_the_same_with_a_trainer(
    options: dict[str, Any], trainer: str, file: Path, tmp_path: Path
) -> None:
    ours = trained(file, tmp_path / "ours", **digits(**options))
    theirs = trained(file, tmp_path / "theirs", **digits(**options), trainer=trainer)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_a_loop_that_leaves_a_step_s_rule_out_does_not_count(file: Path, tmp_path: Path) -> None:
    options = digits(algorithm="fat-clipping-pi", clip_norm=0.1, trainer=":sgd")
    with pytest.raises(RunFailed, match="it was not asked for"):
        trained(file, tmp_path / "run", **options)


def test_side_by_side_in_processes_the_models_are_the_same(file: Path, tmp_path: Path) -> None:
    options = {"data": ":loader", "statistics": "local", "trainer": ":by_hand"}
    one = trained(file, tmp_path / "one", **options)
    two = trained(file, tmp_path / "two", **options, client_processes=2)
    assert equal(one, two)


DIES = """
import os, signal

def dies(model, data, round):
    if round.client_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    by_hand(model, data, round)
"""


@pytest.mark.slow
def test_under_a_claim_a_client_whose_process_ends_has_no_reply(file: Path, tmp_path: Path) -> None:
    """As on a node; that the run ends, and why, would tell of its examples."""
    file.write_text(file.read_text() + DIES)
    private = {"algorithm": "dp-fedavg", "clip_norm": 1.0, "noise_multiplier": 5.0, "delta": 0.01}
    own = {"trainer": ":dies", "model": ":plain", "client_processes": 2}
    trained(file, tmp_path / "claimed", **private, **own)
    summary = summary_of(tmp_path / "claimed")
    assert (summary["status"], summary["privacy"]["rounds_charged"]) == ("completed", 2)
    lines = [line["rejected"] for line in read_lines(tmp_path / "claimed" / "operator.jsonl")]
    assert [[one["client"] for one in rejected] for rejected in lines[-2:]] == [[1], [1]]
    with pytest.raises(RunFailed, match="set client-processes lower"):
        trained(file, tmp_path / "plain", **own)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
def test_the_local_optimizer_is_torch_s(optimizer: str, file: Path, tmp_path: Path) -> None:
    options = digits(local_optimizer=optimizer, num_clients=1, num_server_rounds=1, local_lr=0.01)
    state = trained(file, tmp_path / "run", **options)
    file.write_text(
        file.read_text()
        + """
def theirs(model, data, round):
    made = {"momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.01),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0)}
    steps(model, data, round, made["KIND"](model.parameters()))
""".replace("KIND", optimizer)
    )
    own = trained(
        file,
        tmp_path / "own",
        **digits(num_clients=1, num_server_rounds=1, local_lr=0.01, trainer=":theirs"),
    )
    assert equal(state, own)


def test_statistics_are_learnt_in_training_and_averaged(file: Path, tmp_path: Path) -> None:
    options = {"checkpoint-every": 1, "test-data": ":test", "num-server-rounds": 6}
    final = trained(file, tmp_path / "run", **options)
    assert float(final["1.running_var"].std()) > 0
    last = load_file(tmp_path / "run" / "checkpoints" / "round-00006.safetensors")
    assert equal(final, last)
    seen = entries(tmp_path / "run")
    assert seen[-1]["evaluated_by"] == "server" and seen[-1]["accuracy"] > 0.8


def test_without_test_data_the_clients_evaluate_what_they_hold_out(
    file: Path, tmp_path: Path
) -> None:
    trained(file, tmp_path / "run", num_server_rounds=6)
    last = entries(tmp_path / "run")[-1]
    assert last["evaluated_by"] == "clients"
    assert last["accuracy"] > 0.7 and last["loss"] < 0.7


def test_own_metrics_are_recorded_and_say_which_model_is_best(file: Path, tmp_path: Path) -> None:
    options = {"evaluate": ":judge", "test-data": ":test", "output-iterate": "best"}
    best: dict[str, float] = {}
    for by in ("minimise", "maximise"):
        state = trained(file, tmp_path / by, **options, **{by: "rmse"}, num_server_rounds=3)
        best[by] = float(state["4.bias"][0]) + 2
        seen = [entry["rmse"] for entry in entries(tmp_path / by)]
    assert best["minimise"] <= min(seen) + 1e-6 and best["maximise"] >= max(seen) - 1e-6
    assert best["minimise"] < best["maximise"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trainer": ":broken"}, r"project.py:broken failed: RuntimeError: no such thing \(line"),
        ({"trainer": ":no_metrics"}, "gave 'loss' = 'much': not a number"),
        ({"data": ":tensors"}, "data = .*:tensors gives for client 0 Tensor: a torch Dataset"),
        ({"loss": "squared-error"}, r"gives \(8, 2\) for targets of shape \(8,\)"),
    ],
)
def test_what_is_wrong_with_own_code_is_one_line(
    options: dict[str, Any], said: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises((RunFailed, ConfigError), match=said) as failed:
        trained(file, tmp_path / "run", **options)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": ""}, "data = '' is not allowed with task own-project"),
        ({"model": "mlp-8"}, "model = 'mlp-8' is not allowed with task own-project"),
        ({"local-dp-sgd": True, "dp-sgd-sample-rate": 0.2}, "local-dp-sgd = true is not allowed"),
        ({"attack": "label-flip", "num-byzantine": 1}, "attack = label-flip is not allowed"),
        ({"maximise": "a", "minimise": "b"}, "maximise = a with minimise = b"),
        ({"algorithm": "fa-ld", "local-optimizer": "adam"}, "whose steps are its own"),
        ({"task": "quadratic-noise", "model": "auto", "trainer": ":sgd"}, "have no examples"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], said: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(file, tmp_path / "run", **options)


def test_under_a_claim_statistics_do_not_leave_the_clients(file: Path, tmp_path: Path) -> None:
    private = {"algorithm": "dp-fedavg", "clip-norm": 0.1, "noise-multiplier": 1.0}
    private |= {"delta": 1e-3, "test-data": ":test"}
    with pytest.raises(ConfigError, match="statistics = average breaks the claim"):
        prepare(configured(file, tmp_path / "run", **private))
    trained(file, tmp_path / "run", **private, statistics="local")
    for entry in entries(tmp_path / "run"):
        assert not {"replied", "rejected", "train-loss"} & entry.keys()


@pytest.mark.parametrize("key", ["trainer", "loss", "evaluate", "data"])
def test_a_client_with_a_policy_runs_none_of_it(key: str, file: Path, tmp_path: Path) -> None:
    values = {key: f":{'sgd' if key == 'trainer' else 'judge'}"}
    config = configured(file, tmp_path / "run", **{**digits(model="mlp-8"), **values})
    with pytest.raises(PublicRefusal, match=f"{key} = .*: the client runs no code of the server's"):
        Policy.model_validate({"algorithms": ["gfedavg"]}).check_run(config)
