"""The instruments of a run: what each round adds to metrics.jsonl, and the run to summary.json."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackthorn.randomness import Stream, generator_of
from blackthorn.strategies.instruments import (
    inverse_noise_index,
    measure_updates,
    pooled_tail_index,
)
from blackthorn.strategies.reports import RoundReport

# Rounds over which the tail index is pooled.
TAIL_WINDOW = 10
_LEARNED = 0.10
_LOST = 0.05
# Accuracies are ratios of counts: a hair's breadth must not decide.
_ROUNDING = 1e-9


class FailureDetector:
    """Watches the evaluations of a run for a catastrophic failure of the training (Yang et al.).

    A run has failed when its accuracy, having been above the chance level 1/num_classes by 10
    points or more, falls back to within 5 points of chance (or below it), or when the loss is not
    finite. `failed_round` is the first round in which it had, None while it has not. Without
    classes (`num_classes` below 2) only the loss tells.
    """

    def __init__(self, num_classes: int) -> None:
        self._chance = 1 / num_classes if num_classes >= 2 else math.inf
        self._learned = False
        self.failed_round: int | None = None

    def values(self) -> dict[str, Any]:
        """What `restore` needs, in JSON's types."""
        return {"learned": self._learned, "failed_round": self.failed_round}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from another detector's `values`."""
        self._learned, self.failed_round = values["learned"], values["failed_round"]

    def see(self, server_round: int, accuracy: float | None, loss: float | None) -> None:
        """The evaluation after `server_round` rounds; None for what was not evaluated."""
        if self.failed_round is not None:
            return
        if (loss is not None and not math.isfinite(loss)) or self._lost(accuracy):
            self.failed_round = server_round

    def _lost(self, accuracy: float | None) -> bool:
        if accuracy is None:
            return False
        above = accuracy - self._chance
        self._learned = self._learned or above >= _LEARNED - _ROUNDING
        return self._learned and above <= _LOST + _ROUNDING


class Instruments:
    """Fields for the run folder (see ExtraFields).

    `measures_updates` turns on what reads the clients' updates: the key "instruments", with
    dictionaries by client id, in every round that has updates. The failure detector reads
    evaluations only and always watches: "catastrophic_failure" names the round of failure, from
    then on in every line and, null without one, in the summary.
    """

    def __init__(self, measures_updates: bool, num_classes: int, seed: int) -> None:
        self._measures_updates = measures_updates
        self._detector = FailureDetector(num_classes)
        self._seed = seed
        self._last_update: Tensor | None = None
        self._tails: deque[tuple[float, int]] = deque(maxlen=TAIL_WINDOW)

    def of_round(self, report: RoundReport) -> dict[str, Any]:
        """What the round's line holds beside its counts and metrics."""
        metrics = report.metrics
        self._detector.see(report.server_round, metrics.get("accuracy"), metrics.get("loss"))
        fields: dict[str, Any] = {}
        if self._detector.failed_round is not None:
            fields.update(self.of_run())
        if self._measures_updates and report.updates is not None:
            fields["instruments"] = self._measure(report, report.updates)
            if report.aggregate is not None:
                self._last_update = report.aggregate
        return fields

    def of_run(self) -> dict[str, Any]:
        """What the summary holds beside them."""
        return {"catastrophic_failure": self._detector.failed_round}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """What `restore` needs: arrays, and values in JSON's types."""
        last = self._last_update
        arrays = {} if last is None else {"last_update": last.numpy()}
        return arrays, {"detector": self._detector.values(), "tails": [*map(list, self._tails)]}

    def restore(self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Go on from the `state` of another run's instruments."""
        if "last_update" in arrays:
            self._last_update = torch.from_numpy(arrays["last_update"].copy())
        self._detector.restore(values["detector"])
        self._tails.extend((inverse, count) for inverse, count in values["tails"])

    def _measure(self, report: RoundReport, updates: Tensor) -> dict[str, Any]:
        bound = report.norm_bound
        claims = [report.claimed_norms.get(client, math.nan) for client in report.accepted]
        claimed = torch.tensor(claims, dtype=torch.float64)
        measures = measure_updates(updates, report.local_lr, self._last_update, bound, claimed)
        inverse = inverse_noise_index(
            updates, generator_of(Stream.TAIL_INDEX, self._seed, report.server_round)
        )
        self._tails.append((inverse, len(updates)))
        return {
            "norm_gradient": _by_client(report.accepted, measures.norms),
            **_claims(report),
            "norm_parameter": _by_client(report.accepted, measures.parameter_norms),
            "angle_degrees": _by_client(report.accepted, measures.angles),
            "bound_gradient": _number(bound),
            "bound_parameter": _number(bound * report.local_lr),
            "norm_variation": _number(measures.variation),
            "mean_clipping_factor": _number(measures.clipping_factor),
            "share_at_bound": _number(measures.share_at_bound),
            "tail_index": _number(pooled_tail_index([self._tails[-1]])),
            "tail_index_window": _number(pooled_tail_index(self._tails)),
        }


def _claims(report: RoundReport) -> dict[str, Any]:
    """The norms before clipping that clients tell of; nothing where none of them clips."""
    if not report.claimed_norms:
        return {}
    claims = {str(client): _number(norm) for client, norm in report.claimed_norms.items()}
    return {"norm_gradient_before_clipping": claims}


def _by_client(clients: list[int], values: Tensor) -> dict[str, float | None]:
    numbers = zip(clients, values.tolist(), strict=True)
    return {str(client): _number(value) for client, value in numbers}


def _number(value: float) -> float | None:
    """Six digits, for the sake of the file's size; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
