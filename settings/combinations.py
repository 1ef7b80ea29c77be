"""Values that do not go together: refused in one line, before anything is contacted."""

from blackthorn.settings.algorithm_checks import LARGEST_FLOAT, check_algorithm
from blackthorn.settings.catalogue import WEIGHTED, facts_of
from blackthorn.settings.cohort_risk import check_cohorts
from blackthorn.settings.derived import clip_units, contraction_of, expected_cohort, invited
from blackthorn.settings.keys import Keys
from blackthorn.settings.privacy_checks import check_privacy, is_noised
from blackthorn.settings.project_checks import check_project
from blackthorn.settings.robustness_checks import (
    FEWEST_ROUNDS,
    assumed_corrupt,
    check_robustness,
    most_corrupt,
    rule_of,
)

# Just above the smallest float32 of full precision: the server divides by the rate.
_SMALLEST_RATE = 1.2e-38


def check_combinations(config: Keys) -> None:
    """Raises ValueError, one line, for the first that is found."""
    _check_adversary(config)
    _check_participation(config)
    _check_corrupt(config)
    _check_quorum(config)
    _check_oversampling(config)
    _check_rates(config)
    _check_output(config)
    check_algorithm(config, facts_of(config.algorithm))
    check_privacy(config)
    _check_own_data(config)
    check_project(config)


def _check_adversary(config: Keys) -> None:
    check_robustness(config, expected_cohort(config))
    if config.num_byzantine > config.num_clients:
        raise ValueError(
            f"num-byzantine = {config.num_byzantine} is not allowed: at most num-clients "
            f"= {config.num_clients}"
        )
    if config.num_byzantine and config.attack == "none":
        raise ValueError(
            f"num-byzantine = {config.num_byzantine} with attack = none is not allowed: "
            "say what they do (attack), or set num-byzantine = 0"
        )


def _check_corrupt(config: Keys) -> None:
    if config.corrupt_clients > config.num_clients:
        raise ValueError(
            f"corrupt-clients = {config.corrupt_clients} is not allowed: at most num-clients "
            f"= {config.num_clients}"
        )
    check_cohorts(config)
    if config.quarantine_after == 0:
        return
    said = f"quarantine-after = {config.quarantine_after} is not allowed"
    if is_noised(config) or config.local_dp_sgd:
        raise ValueError(
            f"{said} with noise for privacy, whose cohorts hang on no client's update: set 0"
        )
    if config.quarantine_after < FEWEST_ROUNDS:
        raise ValueError(
            f"{said}: 0, or at least {FEWEST_ROUNDS} rounds, from which on it is known"
        )
    cohort = expected_cohort(config)
    assumed = assumed_corrupt(config, cohort)
    if config.participation == "full" and most_corrupt(config, cohort - assumed) < assumed <= (
        config.num_corrupt
    ):
        raise ValueError(
            f"{said} with num-corrupt = {assumed}: without as many of the {cohort} clients "
            f"{rule_of(config)} could not protect the others; set corrupt-fraction"
        )


def _check_rates(config: Keys) -> None:
    """Rates, and thresholds in either unit, are float32 numbers of full precision in any round."""
    first = last = config.local_lr
    _check_float32(f"local-lr = {first}", "the rate", first)
    set_so = f"local-lr = {first}"
    if config.local_lr_decay_when == "every-round":
        last *= config.local_lr_decay ** (config.num_server_rounds - 1)
        set_so += f" and local-lr-decay = {config.local_lr_decay}"
        _check_float32(set_so, "the last round's rate", last)
    if config.clip_norm == 0:
        return
    set_so = f"clip-norm = {config.clip_norm} with {set_so}"
    _check_float32(set_so, "the threshold", config.clip_norm)
    in_gradient = clip_units(config) == "gradient"
    for rate in (first, last):
        converted = config.clip_norm * rate if in_gradient else config.clip_norm / rate
        other = "parameter" if in_gradient else "gradient"
        _check_float32(set_so, f"at the rate {rate:g} the threshold in {other} units", converted)


def _check_float32(set_so: str, name: str, value: float) -> None:
    if not _SMALLEST_RATE <= value <= LARGEST_FLOAT:
        raise ValueError(
            f"{set_so} is not allowed: {_SMALLEST_RATE:g} to {LARGEST_FLOAT:g}, since training is "
            f"in float32, and {name} is {value:g}"
        )


def _check_output(config: Keys) -> None:
    if config.maximise and config.minimise:
        raise ValueError(
            f"maximise = {config.maximise} with minimise = {config.minimise} is not allowed: a "
            "model is judged by one of them"
        )
    contraction = contraction_of(config)
    if config.output_iterate in WEIGHTED and not 0 < contraction < 1:
        raise ValueError(
            f"output-iterate = {config.output_iterate} is not allowed with strong-convexity x "
            f"server-lr x local-lr x local-steps / 2 = {contraction:g}: greater than 0 and less "
            "than 1"
        )


def _check_quorum(config: Keys) -> None:
    most = config.clients_per_round if config.participation == "fixed" else config.num_clients
    if config.min_replies > most:
        raise ValueError(
            f"min-replies = {config.min_replies} is not allowed: at most {most}, the clients that "
            "a round can have"
        )


def _check_participation(config: Keys) -> None:
    size = config.clients_per_round
    if config.participation == "fixed" and not 1 <= size <= config.num_clients:
        raise ValueError(
            f"clients-per-round = {size} is not allowed: participation fixed needs 1 to "
            f"num-clients = {config.num_clients}"
        )
    if config.participation == "full" and size not in (0, config.num_clients):
        raise ValueError(
            f"clients-per-round = {size} is not allowed with participation full: "
            "set participation = fixed"
        )
    if config.participation == "with-replacement" and size < 1:
        raise ValueError(
            f"clients-per-round = {size} is not allowed: participation with-replacement needs at "
            "least 1 draw"
        )
    if config.participation == "rotating" and not is_noised(config):
        raise ValueError(
            "participation = rotating is not allowed without noise for privacy, for which clients "
            "take turns: set noise-multiplier or epsilon, or participation = fixed"
        )
    if config.participation == "rotating" and not 2 <= config.bands <= config.num_clients:
        raise ValueError(
            f"bands = {config.bands} is not allowed with participation rotating: 2 to num-clients "
            f"= {config.num_clients} groups"
        )
    if config.participation != "poisson" and config.sample_rate != 1.0:
        raise ValueError(
            f"sample-rate = {config.sample_rate} is not allowed with participation "
            f"{config.participation}: set participation = poisson or sample-rate = 1"
        )


def _check_oversampling(config: Keys) -> None:
    if config.oversample == 1:
        return
    said = f"oversample = {config.oversample} is not allowed"
    if config.participation != "fixed":
        raise ValueError(
            f"{said} with participation {config.participation}: set participation = fixed"
        )
    if invited(config) > config.num_clients:
        raise ValueError(
            f"{said}: {invited(config)} clients would be invited, at most num-clients "
            f"= {config.num_clients}"
        )
    if is_noised(config):
        raise ValueError(
            f"{said} with noise for privacy, whose cohort is drawn and not the fastest: set 1.0"
        )
    if config.corrupt_fraction > 0:
        raise ValueError(
            f"{said} with corrupt-fraction: clients that lie may all be among the first. "
            "Set num-corrupt to their number among the invited"
        )


def _check_own_data(config: Keys) -> None:
    if config.task not in ("own-data", "features"):
        return
    if not config.input_shape or config.num_classes < 2:
        raise ValueError(
            f'input-shape = "{config.input_shape}" with num-classes = {config.num_classes} is not '
            f"allowed: task {config.task} needs a shape such as 1,28,28 and at least 2 classes"
        )
