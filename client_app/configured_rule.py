"""What a client does by its run's configuration, against what the server asks for in the round."""

import torch
from flwr.app import ArrayRecord

from blackthorn.client_app.disclosure import PublicRefusal, check_claim, check_tells, level
from blackthorn.client_app.messages import RoundRequest, start_vector
from blackthorn.settings.config import RunConfig
from blackthorn.strategies.algorithms import algorithm_class, check_training
from blackthorn.strategies.bounding import check_float32
from blackthorn.strategies.local_rule import LocalRule
from blackthorn.tasks.flat_model import FlatModel


def asked_start(arrays: ArrayRecord, model: FlatModel) -> torch.Tensor:
    """w_t [d] as the server sends it.

    Raises PublicRefusal, before an example is looked at, where it is no model of the run's: of
    another kind of numbers, say, of which some batches have a gradient and others none.
    """
    try:
        return start_vector(arrays, model)
    except ValueError as error:
        raise PublicRefusal(f"the server's model is not the run's: {error}") from None


def check_rule(config: RunConfig, request: RoundRequest) -> LocalRule:
    """The rule that the client carries out, by the configuration at the round's rate.

    Raises PublicRefusal, so that nothing is sent, where the server's is another, which is never
    carried out, nor attested, where rate or bound are too small or too large to be kept to, or the
    server claims what the configuration does not.
    """
    check_claim(config, request.claimed)
    try:
        check_float32("the server's local-lr", request.local_lr)
        own = configured_rule(config, request)
        check_training(config, own)
        if request.rule == own.sent:
            own.check_range(request.local_lr)
            check_tells(level(config), own.tells)
            return own
    except ValueError as error:
        raise PublicRefusal(str(error)) from None
    raise PublicRefusal(
        f"the server asks for the rule {request.rule}: by the run's configuration it is {own.sent}"
    )


def configured_rule(config: RunConfig, request: RoundRequest) -> LocalRule:
    """The rule that a client carries out by the configuration, at the round's rate."""
    algorithm = algorithm_class(config)
    return algorithm.configured_rule(config, request.local_lr, request.rule)
