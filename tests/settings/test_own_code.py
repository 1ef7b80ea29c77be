"""Models, rules and attacks of the user's own, named as FILE.py:FUNCTION."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn import attacks
from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.app_bundle import bundle_own_code
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.run_folder import read_metrics, read_summary
from blackthorn.reporting.prediction import load_run
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig, make_config, to_mapping
from blackthorn.settings.own_code import own_function
from blackthorn.strategies.aggregation import RoundOfRule
from blackthorn.strategies.aggregators import CorruptionBound, OwnRule

MODEL = """
import torch

def affine(input_shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(num_classes))

def small(input_shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(3))

def broken(input_shape, num_classes):
    raise RuntimeError("no such thing")

def no_module(input_shape, num_classes):
    return lambda x: x.flatten(1)[:, :num_classes]

number = 3
"""
RULE = """
import torch
from blackthorn.strategies import Aggregate

def told(updates, num_corrupt):
    rows = len(updates)
    survivors = torch.ones(rows, dtype=torch.bool)
    return Aggregate(updates.mean(dim=0), torch.full((rows,), 1 / rows), survivors)

def average(updates, num_corrupt):
    return updates.mean(dim=0)

def changes_its_input(updates, num_corrupt):
    updates *= 0
    return updates[0]

def infinite(updates, num_corrupt):
    return updates[0] / 0

def short(updates, num_corrupt):
    return updates[0, :2]

def count(updates, num_corrupt):
    return torch.full((updates.shape[1],), float(num_corrupt))
"""
ATTACK = """
def backwards(own, *, num_clients, generator, honest=None):
    return -own
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of each kind, which is the working folder."""
    for name, text in (("my_model", MODEL), ("my_rule", RULE), ("my_attack", ATTACK)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(folder: Path, **options: object) -> RunConfig:
    values = {
        "num-clients": 5,
        "num-server-rounds": 2,
        "local-steps": 2,
        "report": False,
        "output-dir": str(folder),
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    return recipe_config(None, (), values)


def final_model(folder: Path) -> list[np.ndarray]:
    arrays = load_file(folder / "checkpoints" / "final.safetensors")
    return [arrays[name] for name in sorted(arrays)]


@pytest.mark.parametrize("rule", ["average", "told"])
def test_own_code_that_does_what_ours_does_ends_where_ours_ends(code: Path, rule: str) -> None:
    ours = {"aggregator": "mean", "attack": "sign-flip"}
    own = {"aggregator": f"my_rule.py:{rule}", "attack": "my_attack.py:backwards"}
    for name, words in (("ours", ours), ("own", own)):
        simulate(configuration(code / name, num_byzantine=1, **words), Console(quiet=True))
    for a, b in zip(final_model(code / "ours"), final_model(code / "own"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_an_own_model_is_the_seed_s_and_leaves_the_global_generator_alone(code: Path) -> None:
    before = torch.random.get_rng_state()
    states = [
        prepare(configuration(code / "run", model="my_model.py:affine", seed=seed)).problem.state()
        for seed in (1, 1, 2)
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    first, again, other = (state["1.weight"] for state in states)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    simulate(configuration(code / "run", model="my_model.py:affine"), Console(quiet=True))
    entries = read_metrics(code / "run")
    assert entries[-1]["loss"] < entries[0]["loss"]


@pytest.mark.parametrize(
    ("key", "name", "reason"),
    [
        ("aggregator", "nowhere.py:f", "nowhere.py does not exist"),
        ("aggregator", "my_rule.py:absent", "has no function absent"),
        ("aggregator", "raises.py:f", "cannot be imported: ZeroDivisionError"),
        ("aggregator", "my_rule:average", "or a rule of your own as FILE.py:FUNCTION"),
        ("attack", "nowhere.py:f", "nowhere.py does not exist"),
        ("attack", "my_attack.py:absent", "has no function absent"),
        ("model", "nowhere.py:f", "nowhere.py does not exist"),
        ("model", "my_model.py:number", "has no function number"),
        ("model", "my_model.py:small", "to logits [n, 10]"),
        ("model", "my_model.py:broken", "RuntimeError: no such thing"),
        ("model", "my_model.py:no_module", "must be a torch.nn.Module"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_starts(
    code: Path, key: str, name: str, reason: str
) -> None:
    words = {key: name, "num_byzantine": 1} if key == "attack" else {key: name}
    with pytest.raises(ConfigError) as raised:
        prepare(configuration(code / "run", **words))
    message = str(raised.value)
    assert message.startswith(f"{key} = ")
    assert reason in message
    assert "\n" not in message
    assert not (code / "run").exists()


def test_no_privacy_is_claimed_for_an_own_rule(code: Path) -> None:
    with pytest.raises(ConfigError, match=r"aggregator = .*my_rule\.py:average"):
        configuration(
            code / "run",
            aggregator="my_rule.py:average",
            algorithm="dp-fedavg",
            participation="poisson",
            sample_rate=0.5,
            clip_norm=1.0,
            epsilon=5.0,
        )


def rule(code: Path, function: str) -> OwnRule:
    name = f"{code / 'my_rule.py'}:{function}"
    return OwnRule(name, CorruptionBound(num_corrupt=2), function=own_function(name))


def test_a_rule_gets_a_copy_and_the_assumed_number(code: Path) -> None:
    updates, weights = torch.ones(5, 3), torch.full((5,), 0.2)
    at = RoundOfRule(1, 0.1, torch.zeros(3), np.random.default_rng(0))
    assert rule(code, "changes_its_input")(updates, weights, at).vector.sum() == 0
    assert updates.sum() == 15
    result = rule(code, "count")(updates, weights, at)
    assert result.vector.tolist() == [2.0, 2.0, 2.0]
    assert result.survivors.all()


@pytest.mark.parametrize(
    ("function", "reason"),
    [("infinite", "3 of 3 values are not finite"), ("short", r"expected \(3,\)")],
)
def test_a_result_that_is_no_model_skips_the_round(code: Path, function: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        at = RoundOfRule(1, 0.1, torch.zeros(3), np.random.default_rng(0))
        rule(code, function)(torch.ones(5, 3), torch.ones(5) / 5, at)


def test_names_without_a_file_mean_what_they_meant() -> None:
    with pytest.raises(ValueError, match="allowed are"):
        attacks.get("backwards")
    assert make_config({"aggregator": "krum", "num-corrupt": 1}).aggregator == "krum"


def test_files_go_with_a_bundle_and_are_found_on_the_module_path(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = code / "staged"
    app.mkdir()
    values = {
        "model": f"{code / 'my_model.py'}:affine",
        "aggregator": f"{code / 'my_rule.py'}:average",
        "attack": "none",
    }
    changed = bundle_own_code(app, values, ("model", "aggregator", "attack"))
    assert changed == {
        "model": "own_code/model_my_model.py:affine",
        "aggregator": "own_code/aggregator_my_rule.py:average",
        "attack": "none",
    }
    with pytest.raises(ValueError, match="does not exist"):
        own_function(str(changed["model"]))
    monkeypatch.syspath_prepend(app)
    assert own_function(str(changed["model"]))((4,), 3)(torch.zeros(1, 4)).shape == (1, 3)


@pytest.mark.deployment
def test_own_code_ends_the_same_in_a_cluster(code: Path) -> None:
    own = {
        "model": "my_model.py:affine",
        "aggregator": "my_rule.py:average",
        "attack": "my_attack.py:backwards",
        "num_byzantine": 1,
    }
    simulate(configuration(code / "simulated", **own), Console(quiet=True))
    cluster(configuration(code / "real", **own), Console(quiet=True))
    for a, b in zip(final_model(code / "simulated"), final_model(code / "real"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


FAULTY = """
def raises(*args, **kwargs):
    return {}["absent"]

def nothing(*args, **kwargs):
    pass

def nan(updates, num_corrupt):
    return updates.mean(dim=0) * float("nan")

def narrow(own, **kwargs):
    return own[:, :3]
"""


@pytest.mark.parametrize(
    ("key", "function", "reason"),
    [
        ("aggregator", "raises", "faulty.py:raises failed: KeyError: 'absent' (line 3)"),
        ("aggregator", "nothing", "faulty.py:nothing gave NoneType, expected a vector"),
        ("aggregator", "nan", "650 of 650 values are not finite"),
        ("attack", "raises", "faulty.py:raises failed: KeyError: 'absent' (line 3)"),
        ("attack", "nothing", "faulty.py:nothing failed: "),
        ("attack", "narrow", "faulty.py:narrow gave an array of shape (1, 3), expected (1, 650)"),
    ],
)
def test_a_fault_in_a_round_is_the_run_s_reason_in_one_line(
    code: Path, key: str, function: str, reason: str
) -> None:
    (code / "faulty.py").write_text(FAULTY)
    words: dict[str, object] = {key: f"faulty.py:{function}", "model": "my_model.py:affine"}
    if key == "attack":
        words["num_byzantine"] = 1
    with pytest.raises(RunFailed) as raised:
        simulate(configuration(code / "run", **words), Console(quiet=True))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    summary = read_summary(code / "run")
    assert summary is not None
    # The summary is released: without the folder.
    assert summary["reason"] == str(raised.value).replace(f"{code}/", "")


def test_a_bundled_file_stays_in_the_run_folder(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a server: names of the bundle, which is gone when the run has ended.
    bundle = code / "bundle"
    bundle.mkdir()
    own = {
        "model": f"{code / 'my_model.py'}:affine",
        "aggregator": f"{code / 'my_rule.py'}:average",
        "attack": "none",
    }
    config = configuration(code / "run", num_server_rounds=1)
    bundled = bundle_own_code(bundle, {**to_mapping(config), **own}, list(own))
    with monkeypatch.context() as on_the_server:
        on_the_server.syspath_prepend(bundle)
        simulate(make_config(bundled), Console(quiet=True))
    shutil.rmtree(bundle)
    loaded, _ = load_run(code / "run")
    kept = code / "run" / "own_code" / "model_my_model.py"
    assert loaded.model == f"{kept}:affine"
    again = recipe_config(code / "run" / "config.toml", [f"output-dir={code / 'again'}"])
    simulate(again, Console(quiet=True))
    for a, b in zip(final_model(code / "run"), final_model(code / "again"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_simulation_keeps_the_code_that_it_ran(code: Path) -> None:
    own = code / "my_model.py"
    simulate(
        configuration(code / "run", model=f"{own}:affine", num_server_rounds=1),
        Console(quiet=True),
    )
    ran = own.read_text()
    own.unlink()
    copy = code / "run" / "own_code" / "model_my_model.py"
    assert copy.read_text() == ran
    loaded, problem = load_run(code / "run")
    assert loaded.model == f"{copy}:affine"
    assert problem.model is not None


CHANGES_ITSELF = """
from pathlib import Path

def train(model, data, round):
    Path(__file__).write_text("def train(*arguments):\\n    raise RuntimeError('edited')\\n")
    model.zero_grad()
"""


def test_a_file_that_changes_while_a_run_goes_on_is_read_by_the_next_run(code: Path) -> None:
    trainer = code / "changes.py"
    trainer.write_text(CHANGES_ITSELF)
    values = {"trainer": f"{trainer}:train", "num-clients": 2, "num-server-rounds": 2}

    def run(name: str) -> None:
        config = make_config({**values, "output-dir": str(code / name), "report": False})
        simulate(config, Console(quiet=True))

    run("first")
    assert [entry["replied"] for entry in read_metrics(code / "first")[1:]] == [2, 2]
    with pytest.raises(RunFailed, match="edited"):
        run("next")
