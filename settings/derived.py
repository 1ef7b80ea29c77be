"""What follows from the keys."""

import math
from typing import Literal

from blackthorn.settings.catalogue import OWN_PROJECT, facts_of
from blackthorn.settings.keys import Keys


def clip_units(config: Keys) -> Literal["gradient", "parameter"]:
    """The unit of clip-norm, with `auto` resolved to the algorithm's own."""
    if config.clip_units != "auto":
        return config.clip_units
    return facts_of(config.algorithm).units


def chain_seed(config: Keys) -> int:
    """The seed of what a chain of a posterior draws for itself: of chain 0 the run's, and of every
    other algorithm; of others another each. What the clients hold is drawn from the run's."""
    chain = config.chain if "chain" in facts_of(config.algorithm).keys else 0
    return (config.seed + 0x9E3779B1 * chain) % 2**32


def contraction_of(config: Keys) -> float:
    """mu eta_g eta_l K / 2, which weighs the iterates of random-weighted and weighted-average."""
    steps = config.server_lr * config.local_lr * config.local_steps
    return config.strong_convexity * steps / 2


def trains_alone(config: Keys) -> bool:
    """Whether each client is trained on its own, by a loop over a module, and not in the batched
    steps that all of a simulation's clients share."""
    return bool(config.trainer) or config.local_optimizer != "sgd" or config.task == OWN_PROJECT


def invited(config: Keys) -> int:
    """Clients that a round of participation fixed invites."""
    # Decimal fractions are not exact in binary: 1.1 x 10 must be 11.
    return math.ceil(round(config.oversample * config.clients_per_round, 9))


def noise_shares(config: Keys) -> int:
    """s, as the PrivacyPlan's: in how many shares clients draw the noise, whoever is asked."""
    return config.clients_per_round if config.participation == "fixed" else config.num_clients


def is_secure(config: Keys) -> bool:
    """Whether the server learns sums alone."""
    return "secure-bits" in facts_of(config.algorithm).keys


def secure_cohort(config: Keys) -> int:
    """n: clients that a round of secure aggregation asks."""
    return config.clients_per_round if config.participation == "fixed" else config.num_clients


def secure_survivors(config: Keys) -> int:
    """n': of them, how many have to be in its sum."""
    # Decimal fractions are not exact in binary: a fifth of 10 are 2.
    cohort = secure_cohort(config)
    return cohort - math.floor(round(config.secure_dropouts * cohort, 9))


def secure_threshold(config: Keys) -> float:
    """More than this share of a neighbourhood opens its secrets."""
    return 2 / 3 if config.secure_server == "malicious" else 0.5


def noise_bands(config: Keys) -> int:
    """Over how many rounds the noise hangs together; 1: it is drawn anew in every round."""
    return config.bands if config.participation == "rotating" and config.banded_noise else 1


def expected_cohort(config: Keys) -> int:
    """Clients in a round: exact for full and fixed participation, the mean for Poisson, the most
    with replacement, the least of those whose turn it is."""
    if config.participation == "fixed":
        return config.clients_per_round
    if config.participation == "with-replacement":
        return min(config.clients_per_round, config.num_clients)
    if config.participation == "poisson":
        return round(config.sample_rate * config.num_clients)
    if config.participation == "rotating":
        return max(1, config.num_clients // max(1, config.bands))
    return config.num_clients
