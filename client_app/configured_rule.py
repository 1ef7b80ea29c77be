"""What a client does by its run's configuration, against what the server asks for in the round."""

import torch
from flwr.app import ArrayRecord

from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.messages import RoundRequest, start_vector
from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import clip_units, noise_shares
from blackthorn.settings.privacy_checks import is_noised
from blackthorn.strategies.local_rule import (
    BOUND,
    CLIP_GRADIENT,
    CLIP_MODEL,
    CLIP_UPDATE,
    LANGEVIN,
    LOCAL_STEPS,
    NOISE_MULTIPLIER,
    NOISE_SHARES,
    NORMALIZE_UPDATE,
    PRIOR_PRECISION,
    SGD,
    SHARED_FRACTION,
    STEP_SIZE,
    STRONG_CONVEXITY,
    TEMPERATURE,
    LocalRule,
)
from blackthorn.strategies.update_clipping import ClipNorm, check_float32
from blackthorn.tasks.flat_model import FlatModel

_RULES = {
    "fat-clipping-pi": CLIP_GRADIENT,
    "fat-clipping-pr": CLIP_UPDATE,
    "ce-fedavg": CLIP_UPDATE,
    "dp-fedavg": CLIP_UPDATE,
    "dp-normfedavg": NORMALIZE_UPDATE,
    "model-clipping": CLIP_MODEL,
    "fa-ld": LANGEVIN,
}


def asked_start(arrays: ArrayRecord, model: FlatModel) -> torch.Tensor:
    """w_t [d] as the server sends it.

    Raises PublicRefusal, before an example is looked at, where it is no model of the run's: of
    another kind of numbers, say, of which some batches have a gradient and others none.
    """
    try:
        return start_vector(arrays, model)
    except ValueError as error:
        raise PublicRefusal(f"the server's model is not the run's: {error}") from None


def check_rule(config: RunConfig, request: RoundRequest) -> None:
    """Raises PublicRefusal, so that nothing is sent, where the server's rule is not the one that
    the configuration gives at the round's rate, as another is never carried out, nor attested, or
    where rate or bound are too small or too large to be kept to."""
    _check_range(request)
    own = configured_rule(config, request)
    if request.rule != own:
        raise PublicRefusal(
            f"the server asks for the rule {request.rule}: by the run's configuration it is {own}"
        )


def _check_range(request: RoundRequest) -> None:
    rate, rule = request.local_lr, request.rule
    try:
        check_float32("the server's local-lr", rate)
        if BOUND in rule.numbers:
            check_float32("the server's bound", rule.numbers[BOUND])
            if rule.name != CLIP_MODEL:
                check_float32("the server's bound x local-lr", rule.numbers[BOUND] * rate)
    except ValueError as error:
        raise PublicRefusal(str(error)) from None


def configured_rule(config: RunConfig, request: RoundRequest) -> LocalRule:
    """The rule that a client carries out by the configuration, at the round's rate."""
    name = _RULES.get(config.algorithm, SGD)
    numbers: dict[str, float] = {}
    if name == LANGEVIN:
        numbers = {
            STEP_SIZE: request.local_lr,
            TEMPERATURE: config.temperature,
            SHARED_FRACTION: config.shared_noise,
            PRIOR_PRECISION: config.prior_precision,
        }
        if config.step_size == "decaying":
            numbers |= {STRONG_CONVEXITY: config.strong_convexity, LOCAL_STEPS: config.local_steps}
    elif name == CLIP_MODEL:
        numbers = {BOUND: config.clip_norm}
    elif name != SGD:
        clip_norm = ClipNorm(config.clip_norm, clip_units(config))
        numbers = {BOUND: clip_norm.in_gradient_units(request.local_lr)}
    if name == CLIP_GRADIENT:
        numbers[LOCAL_STEPS] = config.local_steps
    if is_noised(config) and config.noise_location == "client":
        # A z that the configuration leaves to the server is checked where the noise is added.
        told = request.rule.numbers.get(NOISE_MULTIPLIER, 0.0)
        numbers[NOISE_MULTIPLIER] = config.noise_multiplier or told
        numbers[NOISE_SHARES] = noise_shares(config)
    return LocalRule(name, numbers)
