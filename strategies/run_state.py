"""What a run has to remember between two rounds, so that another process can go on with it.

Most generators need no state: those of cohorts, rules and seeded noise are functions of the seed
and the round, and those for privacy draw from the operating system.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from .reports import RoundReport

_NAMED = 5
# Before the names of an algorithm's own arrays, and of the entries of a mean over the iterates.
OWN = "own-"
MEAN = "mean-"


@dataclass(frozen=True)
class RunState:
    """A strategy after `server_round` rounds: vectors by name, and JSON values by name.

    Arrays: "model" w_{t+1} [d], "velocity" v_t [d] where there is momentum, and "output" [d], the
    iterate to hand out, where that is another one; those of the algorithm, after OWN. In the
    strategy's precision. The mean of the iterates, where it is handed out, entry by entry after
    MEAN, in float64.
    """

    server_round: int
    arrays: dict[str, np.ndarray]
    values: dict[str, Any]
    # Whether `begun` has been made to count what was asked for after this state, by processes
    # that died: who keeps a run folder can tell (`recording.resume`).
    counted: bool = False

    @classmethod
    def of(
        cls,
        server_round: int,
        arrays: Mapping[str, np.ndarray],
        values: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> "RunState":
        """The state of a run, with what its algorithm has to remember, vectors among it: a copy,
        so that neither the run changes what it says, nor its holder the run."""
        vectors = {OWN + name: v for name, v in own.items() if isinstance(v, np.ndarray)}
        others = {name: v for name, v in own.items() if not isinstance(v, np.ndarray)}
        named, told = deepcopy(({**arrays, **vectors}, {**values, "own": others}))
        return cls(server_round, named, told)

    def arrays_of_run(self) -> dict[str, np.ndarray]:
        """The arrays but for the algorithm's own and the means."""
        return {
            name: array for name, array in self.arrays.items() if not name.startswith((OWN, MEAN))
        }

    def means(self) -> dict[str, np.ndarray]:
        """The mean of the iterates, by entry; empty where none is kept."""
        named = {name: array for name, array in self.arrays.items() if name.startswith(MEAN)}
        return {name.removeprefix(MEAN): array for name, array in named.items()}

    @property
    def own(self) -> dict[str, Any]:
        """What the algorithm has to remember, its vectors among it."""
        named = {name: array for name, array in self.arrays.items() if name.startswith(OWN)}
        vectors = {name.removeprefix(OWN): array for name, array in named.items()}
        return {**self.values["own"], **vectors}

    @property
    def begun(self) -> int:
        """How many rounds clients had been asked for, those that were done again counted."""
        return int(self.values.get("rounds_begun", self.server_round))


class NotEnoughReplies(RuntimeError):
    """Round after round had too few replies; the message says which, and why, in one line."""


class QuorumWatch:
    """Counts rounds below the quorum; `fail_after` (None: any number) in a row are too many.

    Raises ValueError for `fail_after` below 1.
    """

    def __init__(self, fail_after: int | None) -> None:
        if fail_after is not None and fail_after < 1:
            raise ValueError(f"fail_after = {fail_after} is not allowed: at least 1")
        self._fail_after = fail_after
        self.in_a_row = 0

    def count(self, report: RoundReport) -> None:
        """Look at a round."""
        self.in_a_row = self.in_a_row + 1 if report.below_quorum else 0

    def check(self, report: RoundReport) -> None:
        """Raises NotEnoughReplies where the round that was counted last is one too many."""
        if self._fail_after is not None and self.in_a_row >= self._fail_after:
            last = report.server_round
            raise NotEnoughReplies(
                f"too few replies in {self.in_a_row} rounds in a row, up to round {last}, which "
                f"had {report.skipped}: {_reasons(report)}"
            )


def _reasons(report: RoundReport) -> str:
    named = [f"client {r.client}: {r.reason}" for r in report.rejected[:_NAMED]]
    more = len(report.rejected) - len(named)
    if more > 0:
        named.append(f"and {more} more")
    return "; ".join(named) or f"{len(report.invited)} clients were invited"
