"""What an algorithm of the user's own has from the classes that it stands on: no privacy is claimed
where anything is in place of the mechanism, and what is known of a published class holds."""

import sys
from pathlib import Path

import policy_client
import pytest
from policy_client import Client, run_config

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.simulation.privacy_audit import audit

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
from blackthorn.settings.catalogue import Facts
from blackthorn.strategies import (
    CEFedAvg, CohortPlan, DPFedAvg, ErrorFeedback, FatClippingPI, FatClippingPR, FederatedStrategy,
    GFedAvg, Rage
)
from blackthorn.strategies import Ledger
from blackthorn.strategies.adaptive_threshold import AdaptiveThreshold, Threshold
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.strategies.turns import Turns


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
        self.bound = lambda updates, context: updates


class Quorum(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self.quorum = 3


class Chosen(DPFedAvg):
    @classmethod
    def build(cls, config, options):
        return Quiet(**options)


class HeadsCounted(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self._weighting = "num-examples"


class ThresholdOfItsOwn(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        adaptive = AdaptiveThreshold(0.5, 0.2)
        self._threshold = Threshold(privacy.clip_norm, adaptive, privacy.cohort_size)


class CountedFewer(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self._threshold.cohort_size = 0.05


class LedgerOfItsOwn(DPFedAvg):
    def __init__(self, privacy, ledger=None, **options):
        super().__init__(privacy, ledger=ledger, **options)
        self.ledger = Ledger(replace(privacy, delta=0.1), ledger)


class TurnsOfItsOwn(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(privacy, **options)
        self._turns = Turns(replace(privacy, bands=1), None, "query")


class Unledgered(DPFedAvg):
    def __init__(self, privacy, ledger=None, **options):
        super().__init__(privacy, **options)


class Cheaper(DPFedAvg):
    def __init__(self, privacy, **options):
        super().__init__(replace(privacy, noise_multiplier=0.1), **options)


class PlanOfItsOwn(DPFedAvg):
    # The run's plan as long as it is looked at; in the rounds it may be another.

    @property
    def privacy(self):
        return vars(self)["privacy"]

    @privacy.setter
    def privacy(self, plan):
        vars(self)["privacy"] = plan


class Slotted(DPFedAvg):
    __slots__ = ("_registry",)


class AllItHas(DPFedAvg):
    __dict__ = property(lambda self: {})


class Meta(type(DPFedAvg)):
    @property
    def bounded(cls):
        return None


class ByMetaclass(DPFedAvg, metaclass=Meta):
    pass


class Mixed:
    pass


class WithMixin(Mixed, DPFedAvg):
    pass


class Asked:
    def __get__(self, one, kind):
        return Facts(clip_norm="optional")


class FactsByLook(DPFedAvg):
    facts = Asked()


class OfItsKind(Facts):
    pass


class Samples(DPFedAvg):
    facts = Facts(clip_norm="needed", samples_posterior=True)


class FactsOfItsOwnKind(DPFedAvg):
    facts = OfItsKind()


class Replaced(DPFedAvg):
    facts = Facts(participation=("full", "with-replacement"))


class ReplacedMean(GFedAvg):
    facts = Facts(participation=("full", "with-replacement"))


class Unsaid(FederatedStrategy):
    facts = Facts(participation=("full", "with-replacement"))


class DrawsItself(FederatedStrategy):
    facts = Facts(participation=("full", "with-replacement"))

    def draw_cohort(self, clients, context):
        return CohortPlan.of(clients[:1])


class Steps(FatClippingPI):
    pass


class StepsOfItsOwn(FederatedStrategy):
    def local_rule(self, context):
        return ClipGradient(1.0, 2)

    @classmethod
    def configured_rule(cls, config, local_lr, asked):
        return ClipGradient(1.0, 2)


class AsksAgain(FederatedStrategy):
    def gather(self, transport, asked, context, screening, timeout, enough):
        super().gather(transport, asked, context, screening, timeout, enough)
        return super().gather(transport, asked, context, screening, timeout, enough)


class CountsFewer(FederatedStrategy):
    rounds_begun = 0


class BeginsBelow(FederatedStrategy):
    def __init__(self, **options):
        super().__init__(**options)
        self.rounds_begun = -100


class AsksByAnother(FederatedStrategy):
    def __init__(self, **options):
        super().__init__(**options)
        self.gather = lambda *_: None


class Weighted(ErrorFeedback):
    facts = Facts(clip_norm="optional")


class Parameters(CEFedAvg):
    pass


class Filtered(Rage):
    pass


class Wrong(FederatedStrategy):
    facts = {"clip_norm": "none"}


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
        ("OnTheObject", "it overrides bound of PrivateAveraging"),
        ("Quorum", "it overrides quorum of PrivateAveraging"),
        ("Chosen", "Quiet overrides _noise of PrivateAveraging"),
        ("HeadsCounted", "it overrides _weighting of PrivateAveraging"),
        ("ThresholdOfItsOwn", "it overrides _threshold of PrivateAveraging"),
        ("CountedFewer", "it overrides _threshold of PrivateAveraging"),
        ("LedgerOfItsOwn", "its constructor or its build has not passed on privacy and ledger"),
        ("Unledgered", "its constructor or its build has not passed on privacy and ledger"),
        ("Cheaper", "its constructor or its build has not passed on privacy and ledger"),
        ("PlanOfItsOwn", "PlanOfItsOwn overrides privacy of PrivateAveraging"),
        ("Slotted", "it overrides __slots__ of PrivateAveraging"),
        ("AllItHas", "it overrides __dict__ of PrivateAveraging"),
        ("ByMetaclass", "it overrides __class__ of PrivateAveraging"),
        ("FactsByLook", "its facts are <own_code_"),
        ("Samples", "its facts say samples_posterior, and no privacy is claimed for samples"),
        ("FactsOfItsOwnKind", "its facts are OfItsKind("),
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


def test_nor_may_turns_be_other_than_the_plan_s(code: Path) -> None:
    turns = {"participation": "rotating", "bands": 2}
    prepare(private("More", code, **turns))
    with pytest.raises(ConfigError, match="it overrides _turns of PrivateAveraging"):
        prepare(private("TurnsOfItsOwn", code, **turns))


@pytest.mark.parametrize("name", ["PerStep", "OnTheObject"])
def test_an_audit_prints_no_claim_of_it_either(code: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"it overrides .* of PrivateAveraging"):
        audit(private(name, code), canaries=12, runs=2)


@pytest.mark.parametrize("name", ["More", "WithMixin"])
def test_what_is_none_of_the_mechanism_may_stand_in_the_class(code: Path, name: str) -> None:
    prepare(private(name, code))


def test_without_a_claim_the_mechanism_is_the_user_s(code: Path) -> None:
    prepare(private("FromElsewhere", code, **{"claim-privacy": False}))


OPEN = {"clip-norm": 0.0, "epsilon": 0.0}
CLIPPED = {**OPEN, "clip-norm": 1.0}
TWICE = {"participation": "with-replacement", "clients-per-round": 2}
DP_SGD = {"local-dp-sgd": True, "dp-sgd-sample-rate": 0.1}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Replaced", TWICE, "is not allowed with algorithm"),
        ("ReplacedMean", {**OPEN, **TWICE}, "is not allowed with"),
        ("Unsaid", {**OPEN, **TWICE}, "is not allowed with algorithm"),
        ("Steps", {**CLIPPED, **DP_SGD}, "which has local steps of its own: set local-dp-sgd"),
        ("StepsOfItsOwn", {**OPEN, **DP_SGD}, "whose rule clip-gradient is carried out at every"),
        ("AsksAgain", {**OPEN, **DP_SGD}, "it overrides gather of FederatedStrategy, by which"),
        ("CountsFewer", {**OPEN, **DP_SGD}, "it overrides rounds_begun of FederatedStrategy, by"),
        ("BeginsBelow", {**OPEN, **DP_SGD}, "it overrides rounds_begun of FederatedStrategy, by"),
        ("AsksByAnother", {**OPEN, **DP_SGD}, "it overrides gather of FederatedStrategy, by which"),
        ("Weighted", OPEN, "clip-norm = 0.0 is not allowed with algorithm"),
        ("Weighted", {**CLIPPED, "weighting": "num-examples"}, "weighting = num-examples is not"),
        ("Weighted", {**CLIPPED, "aggregator": "median"}, "aggregator = median with"),
        ("Parameters", CLIPPED, "clip-units = auto is not known of it: set clip-units = parameter"),
        ("Filtered", OPEN, "aggregator = auto is not known of it: set aggregator = rage, as of"),
        ("Wrong", OPEN, "its facts are {'clip_norm': 'none'}, no Facts of"),
    ],
)
def test_what_is_known_of_the_class_that_it_stands_on_holds(
    code: Path, name: str, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(private(name, code, **options))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Steps", CLIPPED),
        ("StepsOfItsOwn", OPEN),
        ("AsksAgain", OPEN),
        ("DrawsItself", {**OPEN, **DP_SGD}),
        ("DrawsItself", {**OPEN, **TWICE}),
        ("Weighted", CLIPPED),
        ("Parameters", {**CLIPPED, "clip-units": "parameter"}),
        ("Filtered", {**OPEN, "aggregator": "rage", "corrupt-fraction": 0.1}),
    ],
)
def test_what_goes_with_it_is_allowed(code: Path, name: str, options: dict[str, object]) -> None:
    prepare(private(name, code, **options))


def test_a_client_attests_no_steps_that_dp_sgd_does_in_their_place(code: Path) -> None:
    config = run_config({**policy_client.DP_SGD, "algorithm": "own.py:StepsOfItsOwn"})
    told = Client(code, ledger=False).refusal(config, 1)
    assert "whose rule clip-gradient is carried out at every step: set local-dp-sgd" in told
