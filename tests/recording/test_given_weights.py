"""Weights that a run under a claim is given may hold the clients' data: its claim names them."""

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from digits_runs import PRIVATE, SAMPLE, configuration, private_run, run, summary_of
from killed_runs import die_after
from rich.console import Console
from safetensors.torch import save_file

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import read_metrics
from blackthorn.reporting.run_record import read_record
from blackthorn.server_app.claim_checks import shared_examples
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.problem import load_problem
from blackthorn.tasks.shards import ExampleShard

WORDS = "; it starts from given weights, which the figure takes to be public"


def weights(folder: Path, seed: int = 7) -> tuple[Path, str]:
    """A file of weights that is in no run's folder, and its digest."""
    path = folder / "weights" / "start.safetensors"
    path.parent.mkdir(exist_ok=True)
    module = load_problem(configuration(folder, seed=seed)).model.module
    save_file(
        {name: value.contiguous() + seed for name, value in module.state_dict().items()}, path
    )
    return path, f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.parametrize(
    ("entry", "options"), [("privacy", PRIVATE), ("sample_privacy", SAMPLE)], ids=str
)
def test_the_claim_ends_with_what_it_takes_to_be_public(
    entry: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path, digest = weights(tmp_path)
    said = io.StringIO()
    config = configuration(tmp_path / "run", initial_model=str(path), **options)
    told = simulate(config, Console(file=said, width=1000))
    assert told[entry]["claim"].endswith(WORDS)
    assert told[entry]["initial_model"] == digest
    (line,) = [line for line in told["warnings"] if line.startswith("initial-model")]
    assert digest in line and "to be public" in line
    assert said.getvalue().index(line) < said.getvalue().index("round ")
    assert str(path.parent) not in (tmp_path / "run" / "summary.json").read_text()
    assert {line["initial_model"] for line in read_metrics(tmp_path / "run")} == {digest}


OWN_MODEL = """
import torch
from torch import nn

def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
OF_OWN_CODE = "; what code of one's own loads (model) is taken to be public"


@pytest.mark.parametrize(
    ("entry", "options"), [("privacy", PRIVATE), ("sample_privacy", SAMPLE)], ids=str
)
def test_code_of_ones_own_that_may_load_weights_is_named_by_the_claim(
    entry: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A module comes with whatever weights its function loads, those of another run, too."""
    (tmp_path / "own.py").write_text(OWN_MODEL)
    own = {"model": f"{tmp_path}/own.py:build", "num_server_rounds": 1}
    config = configuration(tmp_path / "run", **options, **own)
    told = simulate(config, Console(quiet=True))
    assert told[entry]["claim"].endswith(OF_OWN_CODE)
    assert told[entry]["own_code"] == ["model"]
    assert any(line.startswith("model: the figure takes") for line in told["warnings"])
    config = configuration(tmp_path / "unclaimed", claim_privacy=False, **options, **own)
    assert not any("to be public" in line for line in prepare(config).warnings)
    config = configuration(tmp_path / "ours", **options)
    assert not any("to be public" in line for line in prepare(config).warnings)


@pytest.mark.parametrize(
    ("entry", "options"), [("privacy", PRIVATE), ("sample_privacy", SAMPLE)], ids=str
)
def test_what_code_of_ones_own_lets_a_run_begin_with_is_known_by_its_digest(
    entry: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also of a run that died and goes on: of what it began with, whatever the code loads then."""
    bias = f"float(open({str(tmp_path / 'bias.txt')!r}).read())"
    loads = f"    nn.init.constant_(module[1].bias, {bias})\n    return module\n"
    code = OWN_MODEL.replace("return nn.Sequential", "module = nn.Sequential")
    (tmp_path / "own.py").write_text(code + loads)
    (tmp_path / "bias.txt").write_text("1.0")
    folder = tmp_path / "run"
    options = {**options, "model": f"{tmp_path}/own.py:build"}
    die_after(2, folder, options)
    state = prepare(configuration(tmp_path / "new", **options)).problem.model.module.state_dict()
    content = b"".join(
        f"{name} torch.float32 {list(value.shape)}\n".encode() + value.numpy().tobytes()
        for name, value in state.items()
    )
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    told = read_record(folder).figures[entry]
    assert told is not None
    assert told["first_model"] == digest
    assert told["claim"].endswith(OF_OWN_CODE)
    assert WORDS not in told["claim"]
    assert "initial_model" not in told
    (tmp_path / "bias.txt").write_text("2.0")
    simulate(configuration(folder, **options, resume=str(folder)), Console(quiet=True))
    assert summary_of(folder)[entry]["first_model"] == digest
    assert {line["first_model"] for line in read_metrics(folder)} == {digest}


@pytest.mark.parametrize("options", [PRIVATE, SAMPLE], ids=["clients", "examples"])
@pytest.mark.parametrize(
    ("partition", "overlap"), [("full", True), ("dominant-label", True), ("label-shards", False)]
)
def test_a_partition_that_deals_one_example_twice_is_told_of_under_a_claim(
    options: dict[str, Any], partition: str, overlap: bool, tmp_path: Path
) -> None:
    values = {**options, "partition": partition, "examples_per_client": 0, "num_clients": 20}
    told = prepare(configuration(tmp_path, **values)).warnings
    assert any("some examples are at several clients" in line for line in told) == overlap
    unclaimed = prepare(configuration(tmp_path, **values, claim_privacy=False)).warnings
    assert not any("several clients" in line for line in unclaimed)


@pytest.mark.parametrize("data_sets", [1, 2])
def test_clients_with_data_sets_of_their_own_share_no_example(
    data_sets: int, tmp_path: Path
) -> None:
    config = configuration(tmp_path, **PRIVATE)
    held = [Examples(torch.zeros(3, 64), torch.zeros(3, dtype=torch.int64)) for _ in range(2)]

    class OwnTask:
        on_nodes = False

        def shards(self, config: RunConfig) -> list[ExampleShard]:
            del config
            return [ExampleShard(held[client % data_sets]) for client in range(2)]

    problem = replace(load_problem(config), task=cast("Any", OwnTask()))
    assert (shared_examples(config, problem) is None) == (data_sets == 2)


def test_a_client_that_has_an_example_more_than_once_is_not_told_of_as_several(
    tmp_path: Path,
) -> None:
    config = configuration(tmp_path, **SAMPLE)
    held = Examples(torch.zeros(3, 64), torch.zeros(3, dtype=torch.int64))

    class OwnTask:
        on_nodes = False

        def shards(self, config: RunConfig) -> list[ExampleShard]:
            del config
            return [ExampleShard(held, np.array([0, 1, 1, 1])), ExampleShard(held, np.array([2]))]

    problem = replace(load_problem(config), task=cast("Any", OwnTask()))
    told = shared_examples(config, problem)
    assert told is not None
    assert "a client has some examples more than once, and the figure counts one of them" in told
    assert "several clients" not in told


@pytest.mark.parametrize("options", [PRIVATE, SAMPLE], ids=["clients", "examples"])
def test_a_start_from_the_seed_and_a_run_without_a_claim_have_no_such_words(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = configuration(tmp_path / "seed", num_server_rounds=1, **options)
    assert "given weights" not in json.dumps(simulate(config, Console(quiet=True)))
    given = str(weights(tmp_path)[0])
    config = configuration(
        tmp_path / "unclaimed", initial_model=given, claim_privacy=False, **options
    )
    assert prepare(config).given == {}


@pytest.mark.parametrize("options", [PRIVATE, SAMPLE], ids=["clients", "examples"])
def test_the_model_of_a_run_that_no_figure_counts_is_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path / "plain", num_server_rounds=1)
    given = {"initial_model": str(tmp_path / "plain" / "checkpoints" / "final.safetensors")}
    with pytest.raises(ConfigError, match=r"initial-model = .* breaks the claim") as caught:
        prepare(configuration(tmp_path / "new", **options, **given))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    prepare(configuration(tmp_path / "new", **options, **given, claim_privacy=False))


def test_the_model_of_a_run_is_taken_where_the_ledger_holds_that_run(tmp_path: Path) -> None:
    private_run(tmp_path / "first")
    given = str(tmp_path / "first" / "checkpoints" / "final.safetensors")
    with pytest.raises(ConfigError, match=r"breaks the claim: it lies in the folder of a run"):
        private_run(tmp_path / "other", initial_model=given)
    ledger = tmp_path / "first" / "ledger.json"
    second = private_run(tmp_path / "second", ledger=str(ledger), initial_model=given)["privacy"]
    assert second["rounds_of_earlier_runs"] == 3
    assert second["claim"].endswith(WORDS)
    # One that holds fewer of its rounds than the run had.
    content = json.loads(ledger.read_text())
    content["charges"] = [{**content["charges"][0], "rounds": 2}]
    content["rounds"] = 2
    ledger.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"does not count it \(it holds 2 rounds"):
        private_run(tmp_path / "third", ledger=str(ledger), initial_model=given)


@pytest.mark.parametrize(
    ("entry", "options"), [("privacy", PRIVATE), ("sample_privacy", SAMPLE)], ids=str
)
@pytest.mark.parametrize("state_every", [0, 1])
def test_a_run_that_died_says_it_and_goes_on_with_the_same_weights_alone(
    state_every: int, entry: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path, digest = weights(tmp_path)
    folder = tmp_path / "run"
    options = {**options, "initial_model": str(path), "state_every": state_every}
    die_after(2, folder, options)
    told = read_record(folder).figures[entry]
    assert told is not None
    assert told["claim"].endswith(WORDS)
    assert told["initial_model"] == digest
    if not state_every:
        return
    weights(tmp_path, seed=8)
    resumed = configuration(folder, **options, resume=str(folder))
    with pytest.raises(ConfigError, match=f"the run began with other weights, {digest}"):
        prepare(resumed)
    weights(tmp_path)
    simulate(resumed, Console(quiet=True))
    assert summary_of(folder)[entry]["initial_model"] == digest
