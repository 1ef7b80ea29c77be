"""Whether the noise leaves anything to learn, from public numbers alone.

In d dimensions the noise on a mean of r updates has the length s z C √d / r, where s is 1, or more
where the noise hangs together over rounds; and no mean of updates is longer than C. Over T rounds
updates may add up to T C, where noise drawn anew adds up to its √T-fold, z C √(d T) / r, and noise
that hangs together to less: once that is above T C, the model goes farther by noise than it could
go by learning.
"""

import math

from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import expected_cohort
from blackthorn.strategies import PrivacyPlan
from blackthorn.strategies.noise_record import round_deviations, summed_deviations


def useless_noise(config: RunConfig, plan: PrivacyPlan | None, dimension: int) -> list[str]:
    """A line for each noise under which a model of `dimension` d cannot be expected to learn."""
    told = []
    if plan is not None:
        # The last round's, which is the longest where noise takes back that of rounds before.
        hangs = float(round_deviations(plan.bands, plan.rounds)[-1])
        s, hanging = ("", "") if plan.bands == 1 else ("s ", f"{hangs:.4g} ")
        noise = hangs * plan.update_multiplier * math.sqrt(dimension)
        told.append(
            _line(
                f"the noise of a round is {{ratio}} times as long as the longest possible mean "
                f"update ({s}z sqrt(d)/r = {hanging}{plan.update_multiplier:.4g} sqrt({dimension})"
                f"/{plan.cohort_size:g})",
                "clients a round",
                "a larger epsilon" if config.epsilon else "a smaller noise-multiplier",
                noise / plan.cohort_size,
                hangs * plan.rounds / float(summed_deviations(plan.bands, plan.rounds)[-1]),
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
                math.sqrt(config.local_steps * config.num_server_rounds * expected_cohort(config)),
            )
        )
    return [line for line in told if line]


def _line(what: str, more: str, or_else: str, ratio: float, gained: float) -> str:
    """`ratio` to 1 is noise to signal, once; "" where that is below 1 over all repetitions, in
    which the signal grows `gained` times as much as the noise."""
    overall = ratio / gained
    if overall <= 1:
        return ""
    return (
        f"{what.format(ratio=f'{ratio:.3g}')}, and over the whole run {overall:.3g} times "
        f"as long as all of them together: do not expect the model to learn; what would help: "
        f"{overall:.3g} times as many {more}, 1/{overall**2:.3g} of the parameters, or {or_else}"
    )
