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
    participation: tuple[str, ...] = ("full", "fixed", "poisson", "rotating")
    leaves: Mapping[str, object] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    @property
    def always_noised(self) -> bool:
        """Whether there is no such algorithm without noise."""
        return self.noised != "" and self.noised == self.where

    @property
    def plain(self) -> bool:
        """Whether clients run local SGD and the server's rule has their updates as they come."""
        return self.clip_norm == "none" and not self.own_steps


_STRATEGIES = "blackthorn.strategies"

_SAMPLER = Facts(
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
        *("burn-in", "thinning", "max-samples", "keep-samples", "missing", "chains", "chain"),
    ),
)

ALGORITHMS = {
    "gfedavg": Facts(f"{_STRATEGIES}.local_sgd:GFedAvg", keys=("client-momentum",)),
    "fat-clipping-pr": Facts(f"{_STRATEGIES}.clipping:FatClippingPR", clip_norm="needed"),
    "fat-clipping-pi": Facts(
        f"{_STRATEGIES}.clipping:FatClippingPI", clip_norm="needed", own_steps=True
    ),
    "ce-fedavg": Facts(
        f"{_STRATEGIES}.clipping:CEFedAvg",
        noised=f"{_STRATEGIES}.private_averaging:DPFedAvg",
        clip_norm="needed",
        units="parameter",
        keys=("clip-quantile", "clip-rate"),
    ),
    "model-clipping": Facts(
        f"{_STRATEGIES}.clipping:ModelClipping", clip_norm="needed", units="parameter"
    ),
    "dp-fedavg": Facts(
        f"{_STRATEGIES}.private_averaging:DPFedAvg",
        noised=f"{_STRATEGIES}.private_averaging:DPFedAvg",
        clip_norm="needed",
        keys=("clip-quantile", "clip-rate"),
    ),
    "dp-normfedavg": Facts(
        f"{_STRATEGIES}.private_averaging:DPNormFedAvg",
        noised=f"{_STRATEGIES}.private_averaging:DPNormFedAvg",
        clip_norm="needed",
    ),
    "secure-dp-fedavg": Facts(
        f"{_STRATEGIES}.secure_averaging:SecureAveraging",
        noised=f"{_STRATEGIES}.secure_averaging:SecureAveraging",
        clip_norm="needed",
        mean_only=True,
        # The server sees who takes part, so that a sample amplifies nothing.
        participation=("full", "fixed"),
        # Of single updates it sees nothing, and the noise is the clients' in its own way.
        leaves={
            "weighting": "uniform",
            "denominator": "fixed",
            "noise-location": "server",
            "neighbours": "auto",
            "accountant": "rdp",
            "oversample": 1.0,
            "instruments": False,
            "num-byzantine": 0,
        },
        keys=("secure-bits", "secure-dropouts", "secure-server"),
    ),
    "rage": Facts(f"{_STRATEGIES}.local_sgd:Rage", rule="rage", keys=("client-momentum",)),
    "biclip": Facts(f"{_STRATEGIES}.biclip:BiClip", own_steps=True),
    "error-feedback": Facts(
        f"{_STRATEGIES}.error_feedback:ErrorFeedback",
        clip_norm="needed",
        mean_only=True,
        leaves={"weighting": "uniform"},
    ),
    "fa-ld": replace(_SAMPLER, where=f"{_STRATEGIES}.fed_langevin:FedLangevin"),
    "sghmc": replace(_SAMPLER, where=f"{_STRATEGIES}.fed_sghmc:FedSghmc"),
    "psgld": replace(
        _SAMPLER, where=f"{_STRATEGIES}.preconditioned_langevin:PreconditionedLangevin"
    ),
    "fsgld": replace(_SAMPLER, where=f"{_STRATEGIES}.conducive_langevin:ConduciveLangevin"),
}
# What is taken of an algorithm of the user's own, FILE.py:NAME, without running its file: whatever
# its class says of itself is checked when a run is prepared.
_OWN = Facts(
    noised="where noise is asked for",
    clip_norm="optional",
    participation=("full", "fixed", "poisson", "rotating", "with-replacement"),
    keys=("client-momentum", "clip-quantile", "clip-rate"),
)
OWN_PROJECT = "own-project"
# Those whose data are numbers of their own, not examples with labels.
CLOSED_FORM = ("quadratic-noise", "least-squares", "bayes-linear")
TASKS = (
    *("digits", "mnist", "fashion-mnist", "emnist", "cifar10", "features", "shakespeare"),
    *("own-data", OWN_PROJECT),
    *CLOSED_FORM,
)
LOSSES = ("cross-entropy", "squared-error", "binary-cross-entropy")
# Values of output-iterate with which strong-convexity weighs the iterates.
WEIGHTED = ("random-weighted", "weighted-average")
# The clients' halves: the name that travels, and the LocalRule that it means.
LOCAL_RULES = {
    "sgd": f"{_STRATEGIES}.local_rule:LocalRule",
    "clip-gradient": f"{_STRATEGIES}.clipping:ClipGradient",
    "clip-update": f"{_STRATEGIES}.bounded_update:ClipUpdate",
    "normalize-update": f"{_STRATEGIES}.bounded_update:NormalizeUpdate",
    "secure-update": f"{_STRATEGIES}.secure_update:SecureUpdate",
    "clip-model": f"{_STRATEGIES}.clipping:ClipModel",
    "biclip-gradient": f"{_STRATEGIES}.biclip:BiClipGradient",
    "client-momentum": f"{_STRATEGIES}.local_sgd:ClientMomentum",
    "clip-difference": f"{_STRATEGIES}.error_feedback:ClipDifference",
    "langevin": f"{_STRATEGIES}.fed_langevin:LangevinSteps",
    "sghmc": f"{_STRATEGIES}.fed_sghmc:SghmcSteps",
    "preconditioned": f"{_STRATEGIES}.preconditioned_langevin:PreconditionedSteps",
    "fit-gradient": f"{_STRATEGIES}.conducive_langevin:FitGradient",
    "fit-curvature": f"{_STRATEGIES}.conducive_langevin:FitCurvature",
    "conducive": f"{_STRATEGIES}.conducive_langevin:ConduciveSteps",
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
    rule is the plain mean; `by_products`: the answer is a sum of the rows whose coefficients follow
    from their inner products alone.
    """

    words: str
    share: float
    most: Callable[[int], int]
    mean_at_0: bool = False
    by_products: bool = False


THIRD = Guarantee("a third", 1 / 3, lambda rows: (rows - 1) // 3, True, by_products=True)
HALF = Guarantee("half", 1 / 2, lambda rows: (rows - 1) // 2)
_TRIMMING = replace(HALF, mean_at_0=True)
_KRUM = Guarantee("half", 1 / 2, lambda rows: (rows - 3) // 2, by_products=True)
_BULYAN = Guarantee("a quarter", 1 / 4, lambda rows: (rows - 3) // 4)
# Subsets of clients that smea goes through: a second's work at most.
MOST_SUBSETS = 20_000


def _few_subsets(rows: int) -> int:
    allowed = range(HALF.most(rows) + 1)
    return max((b for b in allowed if math.comb(rows, b) <= MOST_SUBSETS), default=-1)


_SUBSETS = Guarantee(
    f"half, and at most {MOST_SUBSETS} subsets without them,", 1 / 2, _few_subsets, by_products=True
)

GUARANTEES = {
    "rage": THIRD,
    "median": HALF,
    "trimmed-mean": _TRIMMING,
    "krum": _KRUM,
    "multi-krum": _KRUM,
    "bulyan": _BULYAN,
    "geometric-median": replace(HALF, by_products=True),
    "centered-clipping": HALF,
    "caf": replace(_TRIMMING, by_products=True),
    "mda": replace(_TRIMMING, by_products=True),
    "mean-around-median": _TRIMMING,
    "monna": _TRIMMING,
    "smea": _SUBSETS,
}
# Rules that look at data which the server knows to be right: any number may be corrupt but all.
TRUSTED = ("fltrust", "validated")
ANY = Guarantee("all", 1.0, lambda rows: rows - 1)
AGGREGATORS = ("auto", "mean", *GUARANTEES, *TRUSTED)
