"""No privacy is claimed for an algorithm of the user's own that has anything in place of the
mechanism, wherever it has it from."""

import sys
from pathlib import Path

import pytest

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig

ELSEWHERE = """
from blackthorn.strategies import DPFedAvg, FederatedStrategy

class Quiet(DPFedAvg):
    def _noise(self, share, context):
        return 0 * super()._noise(share, context)

class Doubles(FederatedStrategy):
    def aggregate(self, updates, weights, context):
        return super().aggregate(2 * updates, weights, context)
"""
OWN = """
from dataclasses import replace

from elsewhere import Quiet, Doubles
from blackthorn.strategies import DPFedAvg, FatClippingPI, FatClippingPR


class PerRound(FatClippingPR, DPFedAvg):
    pass


class PerStep(FatClippingPI, DPFedAvg):
    pass


class FromElsewhere(Quiet):
    pass


class Behind(DPFedAvg, Doubles):
    pass


class OnTheObject(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self.constrain = lambda updates, bound: updates


class Quorum(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self.quorum = 3


class Unledgered(DPFedAvg):
    def __init__(self, privacy, ledger=None, **options):
        super().__init__(privacy, **options)


class Cheaper(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(replace(privacy, noise_multiplier=0.1), **options)


class More(DPFedAvg):
    length = 3

    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self.longer = self.length + 1

    def on_aggregate(self, vector, local_lr):
        return vector.clamp(-self.longer, self.longer)
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def private(name: str, folder: Path, **options: object) -> RunConfig:
    values = {
        "algorithm": f"own.py:{name}",
        "num-clients": 5,
        "num-server-rounds": 2,
        "local-steps": 2,
        "model": "logistic",
        "clip-norm": 1.0,
        "epsilon": 5.0,
        "output-dir": str(folder / "run"),
        **options,
    }
    return recipe_config(None, (), values)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("PerRound", "it overrides bound, configured_rule, local_rule, norm_bound of Private"),
        ("PerStep", "it overrides bound, configured_rule, local_rule, needs_attestation, norm_"),
        ("FromElsewhere", "it overrides _noise of PrivateAveraging"),
        ("Behind", "it overrides aggregate of PrivateAveraging"),
        ("OnTheObject", "it overrides constrain of PrivateAveraging"),
        ("Quorum", "it overrides quorum of PrivateAveraging"),
        ("Unledgered", "its constructor or its build has not passed on privacy and ledger"),
        ("Cheaper", "its constructor or its build has not passed on privacy and ledger"),
    ],
)
@pytest.mark.parametrize("location", ["server", "client"])
def test_whoever_wrote_what_stands_in_its_place(
    code: Path, name: str, reason: str, location: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(private(name, code, **{"noise-location": location}))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (code / "run").exists()


def test_what_is_none_of_the_mechanism_may_stand_in_the_class(code: Path) -> None:
    prepare(private("More", code))


def test_without_a_claim_the_mechanism_is_the_user_s(code: Path) -> None:
    prepare(private("FromElsewhere", code, **{"claim-privacy": False}))
