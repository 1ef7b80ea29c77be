"""What an algorithm's facts ask of the other keys: refused in one line where it is not so."""

from blackthorn.settings.catalogue import Facts, named
from blackthorn.settings.keys import Keys
from blackthorn.settings.privacy_checks import is_noised
from blackthorn.settings.robustness_checks import is_robust

# Just below the largest float32.
LARGEST_FLOAT = 3e38


def check_algorithm(config: Keys, facts: Facts) -> None:
    """Raises ValueError, one line, for the first that is found."""
    _check_participation(config, facts)
    for key, usual in facts.leaves.items():
        value = getattr(config, key.replace("-", "_"))
        if value != usual:
            raise ValueError(
                f"{key} = {value} is not allowed with algorithm {config.algorithm}: leave it "
                f"{usual}"
            )
    if facts.mean_only and is_robust(config):
        raise ValueError(
            f"aggregator = {config.aggregator} with pre-aggregator = {config.pre_aggregator} is "
            f"not allowed with algorithm {config.algorithm}: auto or mean, and none"
        )
    _check_clip_norm(config, facts)
    _check_momentum(config, facts)
    if facts.own_steps and config.local_dp_sgd:
        raise ValueError(
            f"local-dp-sgd = true is not allowed with algorithm {config.algorithm}, which has "
            "local steps of its own: set local-dp-sgd = false"
        )
    if facts.samples_posterior:
        _check_samples(config)


def _check_participation(config: Keys, facts: Facts) -> None:
    kind = config.participation
    if kind not in facts.participation:
        others = named(lambda facts: kind in facts.participation)
        raise ValueError(
            f"participation = {kind} is not allowed with algorithm {config.algorithm}: "
            f"{', '.join(facts.participation)} ({kind} is for {', '.join(others)})"
        )


def _check_clip_norm(config: Keys, facts: Facts) -> None:
    if facts.clip_norm == "needed" and config.clip_norm == 0:
        raise ValueError(
            f"clip-norm = 0.0 is not allowed with algorithm {config.algorithm}: greater than 0 "
            "(blackthorn pilot measures a usual one)"
        )
    if is_noised(config) and config.clip_norm == 0:
        raise ValueError("clip-norm = 0.0 is not allowed with noise for privacy: greater than 0")
    if facts.clip_norm == "none" and config.clip_norm > 0:
        clipping = named(lambda facts: facts.clip_norm != "none")
        raise ValueError(
            f"clip-norm = {config.clip_norm} is not allowed with algorithm {config.algorithm}, "
            f"which does not clip: {', '.join(clipping)} do"
        )


def _check_momentum(config: Keys, facts: Facts) -> None:
    if config.client_momentum == 0:
        return
    said = f"client-momentum = {config.client_momentum} is not allowed with"
    if "client-momentum" not in facts.keys:
        others = named(lambda facts: "client-momentum" in facts.keys)
        raise ValueError(
            f"{said} algorithm {config.algorithm}, whose clients do something else with their "
            f"updates: {', '.join(others)} take it"
        )
    if config.local_dp_sgd:
        raise ValueError(
            f"{said} local-dp-sgd = true, whose figures are of updates that hang on one round each"
        )


def _check_samples(config: Keys) -> None:
    """Which models are samples, and of what."""
    if config.step_size == "decaying" and config.strong_convexity == 0:
        raise ValueError(
            "strong-convexity = 0.0 is not allowed with step-size = decaying: greater than 0"
        )
    if config.step_size == "cyclical":
        _check_cycle(config)
    if config.num_server_rounds <= config.burn_in:
        raise ValueError(
            f"burn-in = {config.burn_in} is not allowed with num-server-rounds = "
            f"{config.num_server_rounds}: less, or there is no sample"
        )
    rounds = config.num_server_rounds - config.burn_in
    if config.thinning > rounds:
        raise ValueError(
            f"thinning = {config.thinning} is not allowed with num-server-rounds = "
            f"{config.num_server_rounds} and burn-in = {config.burn_in}: at most {rounds}, or "
            "there is no sample"
        )
    for key, number in (
        ("prior-precision", config.prior_precision),
        ("temperature", config.temperature),
    ):
        if number > LARGEST_FLOAT:
            raise ValueError(
                f"{key} = {number} is not allowed: at most {LARGEST_FLOAT:g}, since training is "
                "in float32"
            )


def _check_cycle(config: Keys) -> None:
    """Samples are of a cycle's last round, whose step is the smallest."""
    cycle = config.cycle_rounds
    if cycle < 2:
        raise ValueError(
            f"cycle-rounds = {cycle} is not allowed with step-size = cyclical: at least 2"
        )
    for key, rounds in (("thinning", config.thinning), ("burn-in", config.burn_in)):
        if rounds % cycle:
            raise ValueError(
                f"{key} = {rounds} is not allowed with cycle-rounds = {cycle}: a multiple of it, "
                "so that every sample is of a cycle's end"
            )
