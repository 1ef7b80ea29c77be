"""What follows from the keys."""

import math
from typing import Literal

from blackthorn.settings.catalogue import facts_of
from blackthorn.settings.keys import Keys


def clip_units(config: Keys) -> Literal["gradient", "parameter"]:
    """The unit of clip-norm, with `auto` resolved to the algorithm's own."""
    if config.clip_units != "auto":
        return config.clip_units
    return facts_of(config.algorithm).units


def contraction_of(config: Keys) -> float:
    """mu eta_g eta_l K / 2, which weighs the iterates of output-iterate = random-weighted."""
    steps = config.server_lr * config.local_lr * config.local_steps
    return config.strong_convexity * steps / 2


def invited(config: Keys) -> int:
    """Clients that a round of participation fixed invites."""
    # Decimal fractions are not exact in binary: 1.1 x 10 must be 11.
    return math.ceil(round(config.oversample * config.clients_per_round, 9))


def noise_shares(config: Keys) -> int:
    """s, as the PrivacyPlan's: in how many shares clients draw the noise, whoever is asked."""
    return config.clients_per_round if config.participation == "fixed" else config.num_clients


def expected_cohort(config: Keys) -> int:
    """Clients in a round: exact for full and fixed participation, the mean for Poisson, the most
    with replacement."""
    if config.participation == "fixed":
        return config.clients_per_round
    if config.participation == "with-replacement":
        return min(config.clients_per_round, config.num_clients)
    if config.participation == "poisson":
        return round(config.sample_rate * config.num_clients)
    return config.num_clients
