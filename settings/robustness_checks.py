"""How many corrupt clients each aggregation rule stands: a run that assumes more is refused here,
in one line, before anything is contacted. In a run it is the rule that refuses a round."""

from blackthorn.settings.catalogue import (
    AGGREGATORS,
    ANY,
    CLOSED_FORM,
    GUARANTEES,
    HALF,
    OWN_PROJECT,
    THIRD,
    TRUSTED,
    Guarantee,
    facts_of,
)
from blackthorn.settings.keys import Keys
from blackthorn.settings.own_code import is_own_code

# Rounds of a client before which nothing is said of it (strategies/suspicion.py).
FEWEST_ROUNDS = 5


def rule_of(config: Keys) -> str:
    """The aggregation rule that runs, with `auto` resolved to the algorithm's own."""
    if config.aggregator != "auto":
        return config.aggregator
    return facts_of(config.algorithm).rule


def by_products(config: Keys) -> bool:
    """Whether the server asks a round's updates for their inner products alone, and sums them."""
    rule = rule_of(config)
    if not facts_of(config.algorithm).plain or (rule == "rage" and config.rage_coordinates > 0):
        return False
    return rule == "mean" or (rule in GUARANTEES and GUARANTEES[rule].by_products)


def is_robust(config: Keys) -> bool:
    """Whether anything but the plain (weighted) mean was asked for by name."""
    return config.aggregator not in ("auto", "mean") or config.pre_aggregator != "none"


def check_robustness(config: Keys, cohort: int) -> None:
    """Raises ValueError, one line, where the rule's guarantee cannot hold in a round.

    `cohort` is the number of clients in a round, or the usual number where that varies.
    """
    rule = rule_of(config)
    if config.aggregator not in AGGREGATORS and not is_own_code(config.aggregator):
        raise ValueError(
            f"aggregator = {config.aggregator!r} is not allowed: {', '.join(AGGREGATORS)}, or a "
            "rule of your own as FILE.py:FUNCTION"
        )
    _check_share(config, rule)
    _check_trusted(config, rule)
    if config.weighting == "num-examples" and (rule != "mean" or is_robust(config)):
        raise ValueError(
            f"weighting = num-examples is not allowed with aggregator = {rule} and pre-aggregator "
            f"= {config.pre_aggregator}, which count every client alike: set weighting = uniform"
        )
    if config.pre_aggregator == "bucketing" and config.bucket_size > cohort:
        raise ValueError(
            f"bucket-size = {config.bucket_size} is not allowed: at most the {cohort} clients in "
            "a round"
        )
    rows, corrupt = _rows(config, cohort), assumed_corrupt(config, cohort)
    most = _most(config, rule, rows)
    # Without a rule that looks at b there is nothing to be too few for.
    if corrupt > most and (corrupt > 0 or rule in GUARANTEES):
        raise ValueError(_too_many(config, rule, cohort, most))
    if rule == "rage" and config.rage_stop == "spectral" and config.rage_variance == 0:
        raise ValueError(
            "rage-variance = 0.0 is not allowed with rage-stop = spectral: greater than 0"
        )
    if rule == "multi-krum" and config.krum_selected > rows - corrupt:
        raise ValueError(
            f"krum-selected = {config.krum_selected} is not allowed: at most {rows - corrupt}, the "
            f"{rows} updates of a round without the {corrupt} assumed corrupt"
        )


def unprotected(config: Keys, cohort: int) -> str:
    """Why a rule that was asked for does not protect, in one line; empty where it does."""
    rule = rule_of(config)
    chosen = config.num_corrupt == 0
    guarantee = GUARANTEES.get(rule)
    # By its own stop rule the covariance alone says how many clients RAGE leaves out.
    by_covariance = rule == "rage" and config.rage_stop == "spectral"
    protects = guarantee is None or not guarantee.mean_at_0 or by_covariance
    if protects or chosen or assumed_corrupt(config, cohort) > 0:
        return ""
    return (
        f"aggregator = {rule} with corrupt-fraction = {config.corrupt_fraction} assumes none of "
        f"{cohort} clients to be corrupt, which is the plain mean: set num-corrupt or "
        "corrupt-fraction"
    )


def _guarantee(config: Keys, rule: str) -> Guarantee:
    """The rule's; what is assumed of corrupt clients must make sense where no rule looks at it."""
    if rule in TRUSTED:
        return ANY
    return GUARANTEES.get(rule, THIRD if config.aggregator == "auto" else HALF)


def _check_share(config: Keys, rule: str) -> None:
    guarantee = _guarantee(config, rule)
    if config.corrupt_fraction >= guarantee.share:
        raise ValueError(
            f"corrupt-fraction = {config.corrupt_fraction} is not allowed: the guarantee needs "
            f"fewer than {guarantee.words} of the clients corrupt (below "
            f"{guarantee.share:.3g})"
        )


def _check_trusted(config: Keys, rule: str) -> None:
    without = (*CLOSED_FORM, "shakespeare", "own-data", OWN_PROJECT)
    if config.trusted_examples and (config.task in without or is_own_code(config.task)):
        raise ValueError(
            f"trusted-examples = {config.trusted_examples} is not allowed with task {config.task}, "
            "which has no test examples to spare: set trusted-data"
        )
    if rule not in TRUSTED:
        return
    said = f"aggregator = {rule} is not allowed with"
    if (config.trusted_data == "") == (config.trusted_examples == 0):
        raise ValueError(
            f'{said} trusted-data = "{config.trusted_data}" and trusted-examples = '
            f"{config.trusted_examples}: set one of the two"
        )
    if config.pre_aggregator != "none":
        raise ValueError(f"{said} pre-aggregator = {config.pre_aggregator}: set none")
    if not facts_of(config.algorithm).plain:
        raise ValueError(
            f"{said} algorithm {config.algorithm}: the server trains on the trusted data by plain "
            "local SGD, as the clients of gfedavg and rage do"
        )


def most_corrupt(config: Keys, cohort: int) -> int:
    """How many corrupt of `cohort` clients the rule stands."""
    return _most(config, rule_of(config), _rows(config, cohort))


def _rows(config: Keys, cohort: int) -> int:
    """How many updates the rule sees of `cohort` clients."""
    if config.pre_aggregator == "bucketing":
        return -(-cohort // config.bucket_size)
    return cohort


def _most(config: Keys, rule: str, rows: int) -> int:
    most = _guarantee(config, rule).most(rows)
    if config.pre_aggregator in ("nearest-neighbour-mixing", "adaptive-clipping", "equal-lengths"):
        return min(most, HALF.most(rows))
    return most


def _too_many(config: Keys, rule: str, cohort: int, most: int) -> str:
    assumed = f"num-corrupt = {config.num_corrupt}"
    if config.num_corrupt < 0:
        assumed = (
            f"corrupt-fraction = {config.corrupt_fraction} "
            f"({assumed_corrupt(config, cohort)} of {cohort})"
        )
    what = f"{cohort} clients in a round"
    if config.pre_aggregator == "bucketing":
        what = f"{_rows(config, cohort)} buckets of {cohort} clients"
    words = _guarantee(config, rule).words
    allowed = f"at most {most}" if most >= 0 else "too few for this rule"
    return (
        f"{assumed} is not allowed with aggregator = {rule}: the guarantee needs fewer than "
        f"{words} of the {what} corrupt ({allowed})"
    )


def assumed_corrupt(config: Keys, cohort: int) -> int:
    """b among `cohort` replies, by num-corrupt or else corrupt-fraction."""
    if config.num_corrupt >= 0:
        return config.num_corrupt
    # As CorruptionBound.among, which strategies use: 0.29 * 100 is 28.999999999999996 in binary.
    return int(config.corrupt_fraction * cohort + 1e-9)
