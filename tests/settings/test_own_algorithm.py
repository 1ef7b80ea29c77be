"""Algorithms and tasks of the user's own, named as FILE.py:NAME, with options of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policy_client import Client, enrolment, run_config
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.run_folder import read_summary
from blackthorn.reporting.prediction import load_run
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig

ALGORITHMS = """
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from blackthorn.settings.catalogue import Facts
from blackthorn.settings.declaration import KeyGroup
from blackthorn.strategies import FederatedStrategy, LocalRule, clip
from blackthorn.strategies.private_averaging import DPFedAvg


class Bound(KeyGroup):
    upper_bound: float = Field(1.0, gt=0)
    kind: str = "plain"


@dataclass(frozen=True)
class Shorten(LocalRule):
    name: ClassVar[str] = "shorten"
    upper_bound: float

    def on_gradient(self, gradients, params, start):
        return clip(gradients, self.upper_bound)


class Shortened(FederatedStrategy):
    Options = Bound
    needs_attestation = True

    def __init__(self, upper_bound=1.0, kind="plain", **options):
        super().__init__(**options)
        self._rule = Shorten(upper_bound)

    @classmethod
    def configured_rule(cls, config, local_lr, asked):
        return Shorten(cls.option_values(config)["upper_bound"])

    def local_rule(self, context):
        return self._rule


class Signs:
    def __call__(self, vector):
        return vector.sign()


class Private(DPFedAvg):
    # What it holds is of the file's own kinds, which are there when it is copied.
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self.made = Signs()

    def on_aggregate(self, vector, local_lr):
        return self.made(vector)


class HoldsALambda(Private):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self.made = lambda vector: vector.sign()


class Louder(DPFedAvg):
    def combine(self, updates, weights, context):
        return super().combine(2 * updates, weights, context)


class Halves(Shortened):
    @classmethod
    def configured_rule(cls, config, local_lr, asked):
        return Shorten(7.0)


class Steps(FederatedStrategy):
    facts = Facts(own_steps=True)


class NeedsBound(FederatedStrategy):
    facts = Facts(clip_norm="needed")


class Robust(FederatedStrategy):
    facts = Facts(rule="krum")


class Failing(FederatedStrategy):
    def combine(self, updates, weights, context):
        return {}["absent"]


class Unbuilt(FederatedStrategy):
    def __init__(self, something, **options):
        super().__init__(**options)


def function(*args):
    pass
"""
TASKS = """
import blackthorn.tasks.labelled
from types import SimpleNamespace
from dataclasses import replace

def digits(config):
    return blackthorn.tasks.labelled.load(SimpleNamespace(**{**dict(config), "task": "digits"}))

def nothing(config):
    pass

def raises(config):
    return {}["absent"]
"""
PRIVATE = {"participation": "poisson", "sample_rate": 0.5, "clip_norm": 1.0, "epsilon": 5.0}


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both files, which is the working folder."""
    (tmp_path / "mine.py").write_text(ALGORITHMS)
    (tmp_path / "my_task.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(folder: Path, **options: object) -> RunConfig:
    values = {
        "num-clients": 5,
        "num-server-rounds": 2,
        "local-steps": 2,
        "model": "logistic",
        "report": False,
        "output-dir": str(folder),
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    return recipe_config(None, (), values)


def final_model(folder: Path) -> np.ndarray:
    arrays = load_file(folder / "checkpoints" / "final.safetensors")
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


OURS = {"algorithm": "fat-clipping-pi", "clip_norm": 0.05}
OWN = {
    "algorithm": "mine.py:Shortened",
    "algorithm_options": "upper-bound = 0.05",
    "task": "my_task.py:digits",
}


def test_an_own_algorithm_and_task_that_do_what_ours_do_end_where_ours_end(code: Path) -> None:
    simulate(configuration(code / "ours", **OURS), Console(quiet=True))
    simulate(configuration(code / "own", **OWN), Console(quiet=True))
    np.testing.assert_array_equal(final_model(code / "own"), final_model(code / "ours"))
    # The options are read: with others it is another model.
    longer = {**OWN, "algorithm_options": "upper-bound = 0.1"}
    simulate(configuration(code / "other", **longer), Console(quiet=True))
    assert np.abs(final_model(code / "other") - final_model(code / "own")).max() > 1e-3


def test_a_run_keeps_the_files_of_its_algorithm_and_task(code: Path) -> None:
    own = {
        key: v.replace("mi", f"{code}/mi").replace("my_", f"{code}/my_") for key, v in OWN.items()
    }
    simulate(configuration(code / "run", **own), Console(quiet=True))
    for name in ("mine.py", "my_task.py"):
        (code / name).unlink()
    loaded, problem = load_run(code / "run")
    assert loaded.algorithm == f"{code}/run/own_code/algorithm_mine.py:Shortened"
    assert problem.task.num_classes == 10


@pytest.mark.deployment
def test_an_own_algorithm_and_task_end_the_same_in_a_cluster(code: Path) -> None:
    simulate(configuration(code / "simulated", **OWN), Console(quiet=True))
    cluster(configuration(code / "real", **OWN), Console(quiet=True))
    simulated, real = final_model(code / "simulated"), final_model(code / "real")
    np.testing.assert_allclose(simulated, real, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": "nowhere.py:A"}, "nowhere.py does not exist"),
        ({"algorithm": "mine.py:Absent"}, "has no function Absent"),
        ({"algorithm": "mine.py:function"}, "is no subclass of"),
        ({"algorithm": "mine.py:Bound"}, "is no subclass of"),
        ({"algorithm": "mine.py:Halves"}, "its local_rule asks for shorten (upper-bound = 1), and"),
        ({"algorithm": "mine.py:Robust"}, "its facts say more than clip_norm"),
        ({"algorithm": "mine.py:NeedsBound"}, "clip-norm = 0.0 is not allowed with algorithm"),
        (
            {"algorithm": "mine.py:Steps", "local_dp_sgd": True, "dp_sgd_sample_rate": 0.1},
            "local-dp-sgd = true is not allowed with algorithm",
        ),
        ({"algorithm": "mine.py:Unbuilt"}, "missing 1 required positional argument"),
        (
            {**OWN, "algorithm_options": "upper-bound = 0"},
            "algorithm-options: upper-bound = 0 is not allowed: should be greater than 0",
        ),
        (
            {**OWN, "algorithm_options": "uper-bound = 1.0"},
            "algorithm-options: unknown key uper-bound; did you mean upper-bound?",
        ),
        (
            {**OWN, "algorithm_options": 'kind = 3, upper-bound = "much"'},
            "algorithm-options: upper-bound = 'much' is not allowed: should be a valid number",
        ),
        ({**OWN, "algorithm_options": "upper-bound"}, "write TOML values such as"),
        ({**OWN, "algorithm_options": "kind = 'a' }\nother = { b = 1"}, "write TOML values such"),
        ({"algorithm_options": "upper-bound = 1.0"}, "the algorithm has no options"),
        ({"task": "my_task.py:nothing"}, "it gave NoneType, which lacks name, num_classes"),
        ({"task": "my_task.py:raises"}, "my_task.py:raises failed: KeyError: 'absent'"),
        ({"task": "my_task.py:absent"}, "has no function absent"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_starts(
    code: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(configuration(code / "run", **options))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value).replace("}\nother", "")
    assert not (code / "run").exists()


def test_a_hook_that_raises_leaves_the_model_and_says_why_in_one_line(code: Path) -> None:
    with pytest.raises(RunFailed, match=r"mine.py:Failing failed: KeyError: 'absent' \(line \d+\)"):
        simulate(configuration(code / "run", algorithm="mine.py:Failing"), Console(quiet=True))
    summary = read_summary(code / "run")
    assert summary is not None
    assert "Failing failed: KeyError" in summary["reason"]


def test_an_own_algorithm_on_private_averaging_claims_what_it_does_not_touch(code: Path) -> None:
    config = configuration(code / "run", algorithm="mine.py:Private", **PRIVATE)
    simulate(config, Console(quiet=True))
    summary = read_summary(code / "run")
    assert summary is not None
    assert summary["privacy"]["epsilon"] == pytest.approx(5.0, rel=0.01)
    # Signs, times the rate of each of two rounds.
    state = prepare(configuration(code / "again", algorithm="mine.py:Private", **PRIVATE))
    parts = sorted(state.problem.state().items())
    start = np.concatenate([value.numpy().ravel() for _, value in parts])
    rate = config.local_lr
    moved = np.abs(final_model(code / "run") - start) / rate
    np.testing.assert_allclose(np.minimum(moved, np.abs(moved - 2)), 0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": "mine.py:Louder", **PRIVATE}, "it overrides combine of PrivateAveraging"),
        ({"algorithm": "mine.py:HoldsALambda", **PRIVATE}, "made of HoldsALambda cannot be pick"),
        ({"algorithm": "mine.py:Steps", **PRIVATE}, "it does not stand on PrivateAveraging"),
        ({"algorithm": "mine.py:Private"}, "set noise-multiplier or epsilon above 0"),
        (
            {"algorithm": "mine.py:Private", **PRIVATE, "clip_norm": 0.0},
            "clip-norm = 0.0 is not allowed with noise for privacy",
        ),
    ],
)
def test_a_claim_that_own_code_could_break_is_refused(
    code: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(configuration(code / "run", **options))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_mechanism_of_one_s_own_runs_where_nothing_is_claimed(code: Path) -> None:
    options = {"algorithm": "mine.py:Louder", **PRIVATE, "claim_privacy": False}
    prepare(configuration(code / "run", **options))


@pytest.mark.parametrize("key", ["algorithm", "task", "model"])
def test_a_client_with_a_policy_refuses_own_code_and_does_not_run_it(
    tmp_path: Path, key: str
) -> None:
    file, ran = tmp_path / "theirs.py", tmp_path / "ran"
    file.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    client = Client(tmp_path, "max-rounds = 5")
    config = run_config({"num-clients": 4}, **{key: f"{file}:anything"})
    said = f"{key} = {file}:anything: the client runs no code of the server's"
    assert enrolment(client, config) == said
    assert not ran.exists()
