"""What a run configuration may claim: the combinations under which a privacy figure would be false
are refused here, one line each, before anything is contacted."""

from blackthorn.settings.catalogue import facts_of, named
from blackthorn.settings.keys import Keys
from blackthorn.settings.robustness_checks import is_robust

# As for sample-rate: below, nobody is ever drawn, and sizes overflow.
_SMALLEST_SAMPLE_RATE = 1e-9
OR_NO_CLAIM = "or claim-privacy = false (no figure is then reported)"


def is_noised(config: Keys) -> bool:
    """Whether noise is added for client-level privacy."""
    facts = facts_of(config.algorithm)
    asked = config.noise_multiplier > 0 or config.epsilon > 0
    return facts.always_noised or (facts.noised != "" and asked)


def claims_privacy(config: Keys) -> bool:
    """Whether the run reports a figure, so that nothing else may leave the server."""
    return is_noised(config) and config.claim_privacy and not config.insecure_seeded_noise


def claims_sample_privacy(config: Keys) -> bool:
    """Whether every client claims privacy for its single examples, against the server too."""
    return config.local_dp_sgd and config.claim_privacy and not config.insecure_seeded_noise


def claims_anything(config: Keys) -> bool:
    """Whether the run claims privacy for clients or for their examples."""
    return claims_privacy(config) or claims_sample_privacy(config)


def has_central_claim(config: Keys) -> bool:
    """Whether a figure of the released models is claimed, and so charged to a ledger."""
    return claims_privacy(config) and not is_robust(config)


def has_local_claim(config: Keys) -> bool:
    """Whether a figure is claimed of what clients tell the server, which no ledger of the server's
    adds up."""
    at_clients = claims_privacy(config) and config.noise_location == "client"
    return at_clients or claims_sample_privacy(config)


def check_privacy(config: Keys) -> None:
    """Raises ValueError, one line: what is wrong or breaks the claim, and what to set instead."""
    _check_dp_sgd(config)
    if not is_noised(config):
        _check_charged(config)
        _check_unused(config)
        return
    if (config.noise_multiplier > 0) == (config.epsilon > 0):
        raise ValueError(
            f"noise-multiplier = {config.noise_multiplier} with epsilon = {config.epsilon} is not "
            f"allowed with algorithm {config.algorithm}: set one of the two above 0"
        )
    if config.participation == "fixed" and config.neighbours == "add-remove":
        raise ValueError(
            "participation = fixed breaks the claim for neighbours = add-remove, whose figure is "
            "for poisson: set neighbours = zero-out or replace-one"
        )
    if config.participation == "poisson" and config.neighbours not in ("auto", "add-remove"):
        raise ValueError(
            f"participation = poisson breaks the claim for neighbours = {config.neighbours}: "
            "set neighbours = add-remove, or participation = fixed"
        )
    if config.clip_quantile > 0:
        _check_adaptive(config)
    if config.participation == "rotating" and config.noise_location == "client":
        raise ValueError(
            "noise-location = client is not allowed with participation = rotating: the noise of a "
            "round takes back that of the rounds before, of which a client knows nothing; set "
            "noise-location = server, or participation = fixed"
        )
    if claims_privacy(config):
        _check_claim(config)
    _check_charged(config)


def _check_dp_sgd(config: Keys) -> None:
    if not config.local_dp_sgd:
        return
    if config.task in ("quadratic-noise", "least-squares", "shakespeare"):
        raise ValueError(
            f"local-dp-sgd = true is not allowed with task {config.task}: it needs labelled "
            "examples and a logistic, mlp or cnn model"
        )
    if not config.dp_sgd_sample_rate >= _SMALLEST_SAMPLE_RATE or config.batch_size == 0:
        raise ValueError(
            f"dp-sgd-sample-rate = {config.dp_sgd_sample_rate} with batch-size = "
            f"{config.batch_size} is not allowed with local-dp-sgd: a rate of at least "
            f"{_SMALLEST_SAMPLE_RATE:g} and a batch of at least 1 that hold for every client, "
            "such as batch-size / the examples that a client usually has"
        )
    if not claims_sample_privacy(config):
        return
    most = config.dp_sgd_sample_rate / config.batch_size
    if config.delta > most:
        raise ValueError(
            f"delta = {config.delta} breaks the claim of local-dp-sgd: above dp-sgd-sample-rate / "
            f"batch-size = {most:g}, one in the examples that a client usually has, it covers a "
            f"client that sends one of them in full; set delta = {most:g} or less, {OR_NO_CLAIM}"
        )
    if config.weighting == "num-examples":
        raise ValueError(
            "weighting = num-examples breaks the claim of local-dp-sgd: a client may not say how "
            f"many examples it has; set weighting = uniform, {OR_NO_CLAIM}"
        )


def _check_charged(config: Keys) -> None:
    """A ledger that is named is charged and a budget is kept to, or neither may be named."""
    if has_central_claim(config):
        return
    named: dict[str, float | str] = {"max-epsilon": config.max_epsilon}
    if not is_noised(config):
        named, why = {}, f"algorithm {config.algorithm}, which adds no noise"
    elif not config.claim_privacy:
        why = "claim-privacy = false"
    elif config.insecure_seeded_noise:
        why = "insecure-seeded-noise = true"
    else:
        named["epsilon"] = config.epsilon
        why = "a robust aggregator, which has no central figure"
    for key, value in {"ledger": config.ledger, **named}.items():
        if value:
            unset = 'ledger = ""' if key == "ledger" else f"{key} = 0"
            raise ValueError(
                f"{key} = {value} is not allowed with {why}: nothing is charged; set {unset}"
            )


def _check_adaptive(config: Keys) -> None:
    said = f"clip-quantile = {config.clip_quantile} is not allowed"
    if "clip-quantile" not in facts_of(config.algorithm).keys:
        others = named(lambda facts: "clip-quantile" in facts.keys)
        raise ValueError(
            f"{said} with algorithm {config.algorithm}, whose updates all have the length "
            f"clip-norm: {', '.join(others)} take it"
        )
    if config.noise_location == "client":
        raise ValueError(
            f"{said} with noise-location = client: of noised updates nobody can count which were "
            "below the threshold; set noise-location = server"
        )
    if is_robust(config):
        raise ValueError(f"{said} with a robust aggregator: set aggregator = mean")


def _check_unused(config: Keys) -> None:
    noise = {"noise-multiplier": config.noise_multiplier, "epsilon": config.epsilon}
    noise["clip-quantile"] = config.clip_quantile
    for key, value in {**noise, "max-epsilon": config.max_epsilon}.items():
        if value > 0:
            raise ValueError(
                f"{key} = {value} is not allowed with algorithm {config.algorithm}, which adds no "
                f"noise: {', '.join(named(lambda facts: facts.noised != ''))} do"
            )


def _check_claim(config: Keys) -> None:
    for broken, line in _refusals(config):
        if broken:
            raise ValueError(f"{line}, {OR_NO_CLAIM}")


def _refusals(config: Keys) -> list[tuple[bool, str]]:
    robust = is_robust(config)
    rule = f"aggregator = {config.aggregator}"
    if config.pre_aggregator != "none":
        rule += f" with pre-aggregator = {config.pre_aggregator}"
    at_clients = config.noise_location == "client"
    return [
        (
            robust and not at_clients,
            f"{rule} breaks the claim: the sensitivity of a robust rule is not clip-norm/r; set "
            "aggregator = mean and pre-aggregator = none, or noise-location = client (then the "
            "local figure holds)",
        ),
        (
            config.delta > 1 / config.num_clients,
            f"delta = {config.delta} breaks the claim: above 1/num-clients = "
            f"{1 / config.num_clients:g} it covers a server that publishes one client's data in "
            f"full; set delta = {1 / config.num_clients:g} or, better, far less",
        ),
        (
            config.weighting == "num-examples",
            "weighting = num-examples breaks the claim: a client's own count would set its "
            "influence; set weighting = uniform",
        ),
        (
            config.denominator == "replies",
            "denominator = replies breaks the claim: how many answered would scale the model that "
            "is released; set denominator = fixed",
        ),
        (
            config.instruments,
            "instruments = true breaks the claim: they publish every client's norms; set "
            "instruments = false",
        ),
        (
            config.min_replies > 1,
            f"min-replies = {config.min_replies} breaks the claim: a skipped round tells how many "
            "took part; set min-replies = 1",
        ),
        (
            config.below_quorum == "fail",
            "below-quorum = fail breaks the claim: a run that fails tells how many took part; set "
            "below-quorum = skip",
        ),
        (
            at_clients and not config.noise_top_up,
            "noise-top-up = false breaks the claim: how much noise there is would tell who "
            "answered, and where nobody does there is none; set noise-top-up = true",
        ),
        (
            at_clients and not robust and config.num_byzantine > 0,
            f"num-byzantine = {config.num_byzantine} breaks the claim with noise-location = "
            "client: a Byzantine client adds no noise; set noise-location = server",
        ),
        (
            config.collusion and config.num_byzantine > 1 and not at_clients,
            f"collusion = true breaks the claim with num-byzantine = {config.num_byzantine}: one "
            "client's data would stand in the messages of all that share its update; set "
            "collusion = false",
        ),
        (
            config.omniscient and config.num_byzantine > 0,
            "omniscient = true breaks the claim: the attacker sees the honest updates; set "
            "omniscient = false",
        ),
    ]
