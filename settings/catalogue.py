"""The published systems and the aggregation rules by name, and what is known of each.

Everybody else asks for these facts, never for a name.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from blackthorn.settings.own_code import is_own_code

Units = Literal["gradient", "parameter"]
ClipNormUse = Literal["none", "needed", "optional"]


@dataclass(frozen=True)
class Facts:
    """What settings have to know of an algorithm.

    where: "module:Class" of its Strategy, imported when it is needed; noised: the one that adds
        noise for privacy, the same where there is no other, "" where there is none.
    clip_norm: whether the key has to be set, must not be, or may be; units: its usual ones.
    rule: its aggregation rule, where `aggregator` and `pre-aggregator` ask for no other.
    mean_only: it takes no other rule than the mean.
    own_steps: its clients' steps are its own, so that they cannot be DP-SGD's.
    samples_posterior: its models are samples, kept and reported as such.
    participation: the values of that key under which it is what it is called.
    leaves: keys that have to keep a value; keys: those that it reads beside everybody's.
    """

    where: str = ""
    noised: str = ""
    clip_norm: ClipNormUse = "none"
    units: Units = "gradient"
    rule: str = "mean"
    mean_only: bool = False
    own_steps: bool = False
    samples_posterior: bool = False
    participation: tuple[str, ...] = ("full", "fixed", "poisson")
    leaves: Mapping[str, object] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    @property
    def always_noised(self) -> bool:
        """Whether there is no such algorithm without noise."""
        return self.noised != "" and self.noised == self.where


_STRATEGIES = "blackthorn.strategies"

ALGORITHMS = {
    "gfedavg": Facts(f"{_STRATEGIES}.gfedavg:GFedAvg"),
    "fat-clipping-pr": Facts(f"{_STRATEGIES}.clipping:FatClippingPR", clip_norm="needed"),
    "fat-clipping-pi": Facts(
        f"{_STRATEGIES}.clipping:FatClippingPI", clip_norm="needed", own_steps=True
    ),
    "ce-fedavg": Facts(
        f"{_STRATEGIES}.clipping:CEFedAvg",
        noised=f"{_STRATEGIES}.dp_fedavg:DPFedAvg",
        clip_norm="needed",
        units="parameter",
    ),
    "model-clipping": Facts(
        f"{_STRATEGIES}.clipping:ModelClipping", clip_norm="needed", units="parameter"
    ),
    "dp-fedavg": Facts(
        f"{_STRATEGIES}.dp_fedavg:DPFedAvg",
        noised=f"{_STRATEGIES}.dp_fedavg:DPFedAvg",
        clip_norm="needed",
    ),
    "dp-normfedavg": Facts(
        f"{_STRATEGIES}.dp_fedavg:DPNormFedAvg",
        noised=f"{_STRATEGIES}.dp_fedavg:DPNormFedAvg",
        clip_norm="needed",
    ),
    "rage": Facts(f"{_STRATEGIES}.rage_local_sgd:Rage", rule="rage"),
    "biclip": Facts(f"{_STRATEGIES}.biclip:BiClip", own_steps=True),
    "error-feedback": Facts(
        f"{_STRATEGIES}.error_feedback:ErrorFeedback",
        clip_norm="needed",
        mean_only=True,
        leaves={"weighting": "uniform"},
    ),
    "fa-ld": Facts(
        f"{_STRATEGIES}.fed_langevin:FedLangevin",
        own_steps=True,
        samples_posterior=True,
        # Anything else would make the chain's stationary law another one than the posterior: a
        # robust rule would take the noise of some clients away, and who is fast is not drawn.
        participation=("full", "with-replacement", "fixed"),
        mean_only=True,
        leaves={
            "server-lr": 1.0,
            "server-momentum": 0.0,
            "projection-radius": 0.0,
            "weight-decay": 0.0,
            "local-lr-decay": 1.0,
            "weighting": "uniform",
            "oversample": 1.0,
        },
        keys=(
            *("temperature", "shared-noise", "prior-precision", "step-size", "langevin-seed"),
            *("burn-in", "thinning", "max-samples", "keep-samples", "missing"),
        ),
    ),
}
# What is taken of an algorithm of the user's own, FILE.py:NAME, without running its file: whatever
# its class says of itself is checked when a run is prepared.
_OWN = Facts(
    noised="where noise is asked for",
    clip_norm="optional",
    participation=("full", "fixed", "poisson", "with-replacement"),
)
# Those whose data are numbers of their own, not examples with labels.
CLOSED_FORM = ("quadratic-noise", "least-squares", "bayes-linear")
TASKS = (
    *("digits", "mnist", "fashion-mnist", "cifar10", "shakespeare", "own-data"),
    *CLOSED_FORM,
)
# The clients' halves: the name that travels, and the LocalRule that it means.
LOCAL_RULES = {
    "sgd": f"{_STRATEGIES}.local_rule:LocalRule",
    "clip-gradient": f"{_STRATEGIES}.clipping:ClipGradient",
    "clip-update": f"{_STRATEGIES}.bounded_update:ClipUpdate",
    "normalize-update": f"{_STRATEGIES}.dp_fedavg:NormalizeUpdate",
    "clip-model": f"{_STRATEGIES}.clipping:ClipModel",
    "biclip-gradient": f"{_STRATEGIES}.biclip:BiClipGradient",
    "clip-difference": f"{_STRATEGIES}.error_feedback:ClipDifference",
    "langevin": f"{_STRATEGIES}.fed_langevin:LangevinSteps",
}


# What the server makes of a round, for an attacker who knows the configuration.
SERVER_RULE = "blackthorn.server_app.build:server_rule"


def facts_of(algorithm: str) -> Facts:
    """Those of the key `algorithm`: a name of the catalogue, or FILE.py:NAME."""
    return _OWN if is_own_code(algorithm) else ALGORITHMS[algorithm]


def named(which: Callable[[Facts], bool]) -> list[str]:
    """The algorithms whose facts are such, for messages."""
    return [name for name, facts in ALGORITHMS.items() if which(facts)]


def load(where: str) -> Any:
    """What "module:NAME" stands for."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Guarantee:
    """What a rule needs: fewer than `share` of the clients corrupt, and of K rows at most most(K).

    `words` is the share as it is written in messages; `mean_at_0`: with nobody assumed corrupt the
    rule is the plain mean.
    """

    words: str
    share: float
    most: Callable[[int], int]
    mean_at_0: bool = False


THIRD = Guarantee("a third", 1 / 3, lambda rows: (rows - 1) // 3, mean_at_0=True)
HALF = Guarantee("half", 1 / 2, lambda rows: (rows - 1) // 2)
_TRIMMING = replace(HALF, mean_at_0=True)
_KRUM = Guarantee("half", 1 / 2, lambda rows: (rows - 3) // 2)
_BULYAN = Guarantee("a quarter", 1 / 4, lambda rows: (rows - 3) // 4)
# Subsets of clients that smea goes through: some seconds' work.
MOST_SUBSETS = 20_000


def _few_subsets(rows: int) -> int:
    allowed = range(HALF.most(rows) + 1)
    return max((b for b in allowed if math.comb(rows, b) <= MOST_SUBSETS), default=-1)


_SUBSETS = Guarantee(f"half, and at most {MOST_SUBSETS} subsets without them,", 1 / 2, _few_subsets)

GUARANTEES = {
    "rage": THIRD,
    "median": HALF,
    "trimmed-mean": _TRIMMING,
    "krum": _KRUM,
    "multi-krum": _KRUM,
    "bulyan": _BULYAN,
    "geometric-median": HALF,
    "centered-clipping": HALF,
    "caf": _TRIMMING,
    "mda": _TRIMMING,
    "mean-around-median": _TRIMMING,
    "monna": _TRIMMING,
    "smea": _SUBSETS,
}
AGGREGATORS = ("auto", "mean", *GUARANTEES)
