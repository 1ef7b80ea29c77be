"""What a run has to remember between two rounds, so that another process can go on with it.

Most generators need no state: those of cohorts, rules and seeded noise are functions of the seed
and the round, and those for privacy draw from the operating system.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RunState:
    """A strategy after `server_round` rounds: vectors by name, and JSON values by name.

    Arrays: "model" w_{t+1} [d], "velocity" v_t [d] where there is momentum, and "output" [d], the
    iterate to hand out, where that is another one. In the strategy's precision.
    """

    server_round: int
    arrays: dict[str, np.ndarray]
    values: dict[str, Any]
    # Whether `begun` has been made to count what was asked for after this state, by processes
    # that died: who keeps a run folder can tell (`recording.resume`).
    counted: bool = False

    @property
    def begun(self) -> int:
        """How many rounds clients had been asked for, those that were done again counted."""
        return int(self.values.get("rounds_begun", self.server_round))
