"""Whether the noise leaves anything to learn, from public numbers alone.

In d dimensions the noise on a mean of r updates has the length z C √d / r, and no mean of updates
is longer than C. Over T rounds updates may add up to T C, where noise adds up to its √T-fold: once
z √d / (r √T) is above 1, the model goes farther by noise than it could go by learning.
"""

import math

from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import expected_cohort
from blackthorn.strategies import PrivacyPlan


def useless_noise(config: RunConfig, plan: PrivacyPlan | None, dimension: int) -> list[str]:
    """A line for each noise under which a model of `dimension` d cannot be expected to learn."""
    told = []
    if plan is not None:
        told.append(
            _line(
                f"the noise of a round is {{ratio}} times as long as the longest possible mean "
                f"update (z sqrt(d)/r = {plan.noise_multiplier:.4g} sqrt({dimension})/"
                f"{plan.cohort_size:g})",
                "clients a round",
                "a larger epsilon" if config.epsilon else "a smaller noise-multiplier",
                plan.noise_multiplier * math.sqrt(dimension) / plan.cohort_size,
                plan.rounds,
            )
        )
    if config.local_dp_sgd:
        z, batch = config.dp_sgd_noise_multiplier, config.batch_size
        told.append(
            _line(
                f"local-dp-sgd: the noise of a client's step is {{ratio}} times as long as the "
                f"longest possible mean gradient (z sqrt(d)/B = {z:.4g} sqrt({dimension})/{batch})",
                "examples in a batch",
                "a smaller dp-sgd-noise-multiplier",
                z * math.sqrt(dimension) / batch,
                config.local_steps * config.num_server_rounds * expected_cohort(config),
            )
        )
    return [line for line in told if line]


def _line(what: str, more: str, or_else: str, ratio: float, repeated: int) -> str:
    """`ratio` to 1 is noise to signal, once; "" where that is below 1 over all repetitions."""
    overall = ratio / math.sqrt(repeated)
    if overall <= 1:
        return ""
    return (
        f"{what.format(ratio=f'{ratio:.3g}')}, and over the whole run {overall:.3g} times "
        f"as long as all of them together: do not expect the model to learn; what would help: "
        f"{overall:.3g} times as many {more}, 1/{overall**2:.3g} of the parameters, or {or_else}"
    )
