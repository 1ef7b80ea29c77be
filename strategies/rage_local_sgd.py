"""Byzantine-resilient local SGD (Data and Diggavi, Algorithms 1 and 2)."""

from typing import Literal, Unpack

from blackthorn.settings.config import RunConfig

from .aggregation.rage import RageStop
from .aggregators import CorruptionBound, Mixing, RageFilter
from .base import FederatedStrategy
from .gfedavg import GFedAvg
from .options import StrategyOptions


class Rage(FederatedStrategy):
    """w ← w − η_g η_l RAGE(u_i, i ∈ S_t): the mean of the updates that survive the filter.

    `num_corrupt` is the assumed number of corrupt clients in a round; or `corrupt_fraction`, for
    ⌊fraction · replies⌋. `stop`, `coordinates`, `average`, `sigma0_squared` and
    `spectral_constant` are those of the function `rage`.
    `mixing` is a pre-aggregator, such as `Buckets(2)` or `nearest_neighbours`.
    The other options are those of StrategyOptions without `aggregator`; by default a run waits for
    3 · num_corrupt + 1 clients, the fewest among which the filter can protect.
    Raises ValueError unless exactly one of the first two is given, below a third.
    """

    def __init__(
        self,
        num_corrupt: int | None = None,
        *,
        corrupt_fraction: float | None = None,
        stop: RageStop = "count",
        coordinates: int | None = None,
        average: Literal["uniform", "weighted"] = "uniform",
        mixing: Mixing | None = None,
        sigma0_squared: float | None = None,
        spectral_constant: float = 11.0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        if "aggregator" in options:
            raise ValueError("aggregator is not allowed: Rage has its own, GFedAvg takes any")
        corruption = CorruptionBound(num_corrupt, corrupt_fraction)
        if num_corrupt is not None:
            options.setdefault("num_clients", max(2, 3 * num_corrupt + 1))
        options["aggregator"] = RageFilter(
            corruption,
            stop,
            coordinates,
            average,
            mixing,
            sigma0_squared=sigma0_squared,
            spectral_constant=spectral_constant,
        )
        super().__init__(**options)

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
        """With the run's filter; a rule that was asked for by name in its place is local SGD under
        that rule, to compare with RAGE."""
        del config
        rule = options["aggregator"]
        if not isinstance(rule, RageFilter):
            return GFedAvg(**options)
        own: StrategyOptions = {**options}
        del own["aggregator"]
        bound = rule.corruption
        return cls(
            bound.num_corrupt,
            corrupt_fraction=bound.fraction,
            mixing=rule.mixing,
            **rule.options,
            **own,
        )
