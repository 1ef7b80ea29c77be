"""Whatever an algorithm of the user's own raises, or gives that it may not, is one line."""

from pathlib import Path

import pytest
from digits_runs import configuration
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.run_folder import read_metrics
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError

OWN = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from blackthorn.settings.catalogue import Facts
from blackthorn.settings.declaration import KeyGroup
from blackthorn.strategies import FederatedStrategy, LocalRule, coordinate_median


class TakenName(FederatedStrategy):
    class Options(KeyGroup):
        seed: int = Field(3)


class NotTaken(FederatedStrategy):
    class Options(KeyGroup):
        length: float = Field(3.0)


class NoGroup(FederatedStrategy):
    class Options:
        pass


class OddFacts(FederatedStrategy):
    facts = Facts(participation=None)


class NoRule(FederatedStrategy):
    def local_rule(self, context):
        return None


class NoConfiguredRule(FederatedStrategy):
    @classmethod
    def configured_rule(cls, config, local_lr, asked):
        return None


class BuildsThree(FederatedStrategy):
    @classmethod
    def build(cls, config, options):
        return 3


class NoSuper(FederatedStrategy):
    def __init__(self, **options):
        pass


class ALargeNumber(FederatedStrategy):
    def rounds_allowed(self, num_rounds, done, model):
        return 2.5


class DrawsAList(FederatedStrategy):
    def draw_cohort(self, clients, context):
        return clients[:2]


class Raises(FederatedStrategy):
    def draw_cohort(self, clients, context):
        return {}["nobody"]


class AnotherShape(FederatedStrategy):
    def bound(self, updates, context):
        return updates[:, :3]


class FewerRows(FederatedStrategy):
    def bound(self, updates, context):
        return updates[1:]


class AShortVector(FederatedStrategy):
    def combine(self, updates, weights, context):
        return coordinate_median(updates[:, :2], 0)


class CombinesToThree(FederatedStrategy):
    def combine(self, updates, weights, context):
        return 3


class NoVector(FederatedStrategy):
    def on_aggregate(self, vector, local_lr):
        return None


@dataclass(frozen=True)
class Breaking(LocalRule):
    name: ClassVar[str] = "breaking"

    def on_update(self, start, trained, local_lr, round_of):
        raise RuntimeError("broken")


class Breaks(FederatedStrategy):
    def local_rule(self, context):
        return Breaking()

    @classmethod
    def configured_rule(cls, config, local_lr, asked):
        return Breaking()
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("TakenName", "got multiple values for keyword argument 'seed'"),
        ("NotTaken", "got an unexpected keyword argument 'length'"),
        ("NoGroup", "has no attribute 'model_fields'"),
        ("OddFacts", "failed: TypeError"),
        ("NoRule", "local_rule gave NoneType, not LocalRule"),
        ("NoConfiguredRule", "configured_rule gave NoneType, not LocalRule"),
        ("BuildsThree", "build gave int, not FederatedStrategy"),
        ("NoSuper", "its constructor has not called that of FederatedStrategy"),
    ],
)
def test_before_anything_starts(code: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(configuration(code / "run", algorithm=f"odd.py:{name}"))
    assert str(refused.value).startswith(f"algorithm = odd.py:{name} is not allowed: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (code / "run").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ALargeNumber", "rounds_allowed gave float, not int"),
        ("DrawsAList", "draw_cohort gave list, not CohortPlan"),
        ("Raises", "failed: KeyError: 'nobody'"),
        ("AnotherShape", "bound gave the shape [4, 3], not [4, 650]"),
        ("FewerRows", "bound gave the shape [3, 650], not [4, 650]"),
        ("AShortVector", "the server's step has the shape [2], not that of the model, [650]"),
        ("CombinesToThree", "combine gave int, not Aggregate"),
        ("NoVector", "on_aggregate gave NoneType, not Tensor"),
        ("Breaks", "round 1, all 4 clients: error 2: odd.py:Breaks failed: RuntimeError: broken"),
    ],
)
def test_in_a_run_it_is_the_reason_of_the_failure(code: Path, name: str, reason: str) -> None:
    config = configuration(code / "run", algorithm=f"odd.py:{name}", num_server_rounds=2)
    with pytest.raises(RunFailed) as failed:
        simulate(config, Console(quiet=True))
    assert reason in str(failed.value)
    assert "\n" not in str(failed.value)
    if name == "Breaks":
        rejected = [one["reason"] for one in read_metrics(code / "run")[-1]["rejected"]]
        assert all("failed: RuntimeError: broken" in one for one in rejected)
        assert rejected
