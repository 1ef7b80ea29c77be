"""Catastrophic training failure: a run that had learned and then lost it all (Yang et al.)."""

import math
from collections.abc import Mapping
from typing import Any

_LEARNED = 0.10
_LOST = 0.05
# Accuracies are ratios of counts: a hair's breadth must not decide.
_ROUNDING = 1e-9


class FailureDetector:
    """Watches the evaluations of a run.

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
