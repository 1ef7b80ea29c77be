"""What a round tells its observers."""

import math
from dataclasses import dataclass, field

import torch
from flwr.app import MetricRecord

from .guarded_link import Refusal
from .screening import Rejection


@dataclass
class RoundReport:
    """Everything observers may read of one round; changing it changes nothing.

    `accepted` lists the clients whose replies passed screening, in the order of the rows of
    `updates` [K, d] (gradient units, before bounding) and of `weights` [K] (the rule's own).
    `filtered` are the accepted clients that the rule left out, `over_bound` those whose update was
    longer than `norm_bound`, the longest that the algorithm allows, in gradient units. `aggregate`
    [d] is what the rule made of the bounded updates (None: the round was skipped). `skipped` says
    why the model was left as it was (None: it was updated), `below_quorum` whether for want of
    replies, `ends_run` whether the run ends with it. `surplus` are the invited without whom enough
    replies were there. `metrics` are the
    evaluation's, empty in rounds without. `claimed_norms` is what clients that clip say ‖u_i‖ was
    before they did, in gradient units: instruments may show it, nothing may rely on it.
    `sample_epsilons` is what clients with local DP-SGD say one of their examples has spent.
    `seconds`: wall time of the phases "training" (broadcast, local training and the way back),
    "screening", "aggregation" (bounding, the rule, noise), "server-step" and "evaluation".
    `refusals`: what the SuperLink did not let through since the round before, and of whom.
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
    aggregate: torch.Tensor | None = None
    skipped: str | None = None
    below_quorum: bool = False
    ends_run: bool = False
    surplus: list[int] = field(default_factory=list)
    iterations: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_by: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    confidential: bool = False

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
