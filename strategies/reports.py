"""What a round tells: its observers by a report, the log by who was lost in it."""

import logging
import math
from copy import copy, deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import MetricRecord

from .attestation import Attestation
from .local_rule import how_to_attest
from .screening import Rejection

logger = logging.getLogger("blackthorn")


@dataclass(frozen=True)
class Refusal:
    """What the SuperLink refused `count` times in a round.

    `key` is the sender's registered name or fingerprint, `client` the client it holds (None:
    none). `barred`: the key takes no more part until its operator lifts that.
    """

    key: str
    client: int | None
    what: str
    count: int
    barred: bool = False


@dataclass
class RoundReport:
    """Everything observers may read of one round; each has a copy, and changing it changes nothing.
    (Where nothing is claimed `updates` is one tensor for all, which observers leave as it is.)

    `accepted` lists the clients whose replies passed screening, in the order of the rows of
    `updates` [K, d] (gradient units, before bounding) and of `weights` [K] (the rule's own).
    `filtered` are the accepted clients that the rule left out, `over_bound` those whose update was
    longer than `norm_bound`, the longest that the algorithm allows, in gradient units. `aggregate`
    [d] is what the rule made of the bounded updates (None: the round was skipped). `skipped` says
    why the model was left as it was (None: it was updated), `below_quorum` whether for want of
    replies, `ends_run` whether the run ends with it. `surplus` are the invited without whom enough
    replies were there. `metrics` are the evaluation's, empty in rounds without; `unevaluated`: why
    the clients were asked for some and none counts. `warnings`: what people are told once in a
    run, a line each. `claimed_norms` is what clients that clip say ‖u_i‖ was before they did, in
    gradient units: instruments may show it, nothing may rely on it.
    `sample_epsilons` is what clients with local DP-SGD say one of their examples has spent.
    `told`: numbers of what was released, beside the metrics. `seconds`: wall time of the phases
    "training" (broadcast, local training and the way back), "screening", "aggregation"
    (bounding, the rule, noise), "server-step" and "evaluation".
    `refusals`: what the SuperLink did not let through since the round before, and of whom.
    `statistics`: those that are averaged, by name, as they belong to `model` [d].
    `scores`: how far clients are from the others, by `suspicion.py: SCORES`, where that is kept.
    `confidential`: a privacy claim covers the model and the metrics alone; all the rest is for
    the operator's eyes.
    """

    server_round: int
    invited: list[int]
    accepted: list[int]
    rejected: list[Rejection]
    local_lr: float
    model: torch.Tensor
    updates: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    filtered: list[int] = field(default_factory=list)
    over_bound: list[int] = field(default_factory=list)
    norm_bound: float = math.inf
    claimed_norms: dict[int, float] = field(default_factory=dict)
    sample_epsilons: dict[int, float] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    aggregate: torch.Tensor | None = None
    skipped: str | None = None
    below_quorum: bool = False
    ends_run: bool = False
    surplus: list[int] = field(default_factory=list)
    iterations: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    evaluated_by: str | None = None
    unevaluated: str = ""
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    confidential: bool = False

    def copied(self) -> "RoundReport":
        """Another one, with lists, mappings, tensors and arrays of its own: who reads it decides
        neither what others read nor how the run goes on."""
        found = copy(self)
        for name, value in vars(self).items():
            if name == "updates" and not self.confidential:
                # It may be most of what the server holds. Under a claim it is copied all the same:
                # there the mechanism itself has needed more, in float64.
                continue
            own = value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
            setattr(found, name, own)
        return found

    def metric_record(self) -> MetricRecord:
        """The round's counts in Flower's form; none where they are confidential."""
        if self.confidential:
            return MetricRecord({})
        return MetricRecord(
            {
                "invited": len(self.invited),
                "accepted": len(self.accepted),
                "rejected": len(self.rejected),
                "filtered": len(self.filtered),
            }
        )


class LossLog:
    """Says in the log who was rejected and why; of a confidential round only at level DEBUG."""

    def __init__(self) -> None:
        self._told_of_silence = False

    def note(self, report: RoundReport, attested: Attestation | None) -> None:
        """Log a round's losses; `attested` is what its replies had to hold."""
        level = logging.DEBUG if report.confidential else logging.WARNING
        for lost in report.rejected:
            told = (report.server_round, lost.client, lost.reason)
            logger.log(level, "round %d: client %d rejected: %s", *told)
        if report.skipped:
            told_of_round = (report.server_round, report.skipped)
            logger.log(level, "round %d left the model as it was: %s", *told_of_round)
        if report.confidential and report.invited and not report.accepted:
            self._tell_of_silence(report, attested)

    def _tell_of_silence(self, report: RoundReport, attested: Attestation | None) -> None:
        """Once in a run that nobody counted in a round, without a name or a client's words."""
        if self._told_of_silence:
            return
        self._told_of_silence = True
        needed = (
            f", and none would that does not attest {attested.rule}: {how_to_attest(attested.rule)}"
            if attested
            else ""
        )
        left = "stays as it was" if report.skipped else "moves by noise alone"
        logger.warning(
            "round %d: no reply counts%s. The model %s. This is said once; who was rejected and "
            "why is logged at level DEBUG, for the operator alone",
            report.server_round,
            needed,
            left,
        )
