"""The ClientApp: one node's client trains, evaluates, and says who it is."""

import logging
from collections.abc import Sequence

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from blackthorn.flower_port.programs import answer_with
from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.settings.own_code import is_own_code
from blackthorn.settings.privacy_checks import claims_privacy
from blackthorn.strategies.local_rule import LocalRule, LocalSGD, LocalSteps
from blackthorn.tasks.evaluation import evaluate
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.shards import Shard

from .configured_rule import asked_start, check_rule
from .disclosure import disclosing
from .dp_sgd import sample_epsilon, train_clients_privately
from .global_generators import global_generators_kept, seed_global_generators
from .messages import (
    RoundRequest,
    enrolment_refusal,
    enrolment_reply,
    evaluate_reply,
    read_model,
    read_round,
    train_reply,
    trained_arrays,
)
from .node_data import NodeClient, load_node_client, node_client_id
from .permitting import permitting
from .private_update import noised_models, rounds_of
from .training import ClientGenerators, train_clients, training_device

_TRAINED = "rounds-trained"

logger = logging.getLogger("blackthorn")

app = ClientApp(mods=[permitting, disclosing])


def local_training(
    config: RunConfig, rule: LocalRule, requests: Sequence[RoundRequest], clients: Sequence[int]
) -> LocalSteps:
    """The local training of `clients` in a round, as the run configuration and the rule say."""
    sgd = LocalSGD(
        steps=config.local_steps,
        batch_size=config.batch_size,
        learning_rate=requests[0].local_lr,
        weight_decay=config.weight_decay,
        rule=rule,
    )
    return rule.steps(sgd, len(clients), rounds_of(config, requests, clients))


def trained_norms(
    config: RunConfig, rule: LocalRule, start: torch.Tensor, params: torch.Tensor, local_lr: float
) -> list[float | None]:
    """What the B clients say of their models for the server's instruments, where it has any."""
    if not config.instruments:
        return [None] * len(params)
    return rule.trained_norms(start, params, local_lr)


def train_as_configured(
    config: RunConfig,
    model: FlatModel,
    start: Tensor,
    shards: Sequence[Shard],
    rule: LocalRule,
    requests: Sequence[RoundRequest],
    keys: Sequence[tuple[int, int, int]],
) -> tuple[Tensor, Tensor]:
    """`train_clients`, by the steps of `rule`; a key is a client's seed, round and number.

    Under a central claim a model of one's own, or of a task of one's own, which may draw random
    numbers or remember in `forward`, is trained for each client apart: one client's being there
    must move no other's update.
    """
    own = is_own_code(config.model) or is_own_code(config.task)
    if own and claims_privacy(config):
        return _train_apart(config, model, start, shards, rule, requests, keys)
    steps = local_training(config, rule, requests, [client for _, _, client in keys])
    return train_clients(model, start, shards, steps, ClientGenerators(keys))


def _train_apart(
    config: RunConfig,
    model: FlatModel,
    start: Tensor,
    shards: Sequence[Shard],
    rule: LocalRule,
    requests: Sequence[RoundRequest],
    keys: Sequence[tuple[int, int, int]],
) -> tuple[Tensor, Tensor]:
    """Each client with a copy of the module as it was loaded, and global generators of its own."""
    starts = start.expand(len(shards), start.shape[-1])
    params, losses = torch.empty_like(starts), start.new_empty(len(shards))
    for i, (shard, request, key) in enumerate(zip(shards, requests, keys, strict=True)):
        seed = int(generator_of(Stream.OWN_MODEL, *key).integers(2**32))
        batches = ClientGenerators([key])
        steps = local_training(config, rule, [request], [key[2]])
        with global_generators_kept(model.device):
            seed_global_generators(seed, model.device)
            own, losses[i : i + 1] = train_clients(model.copy(), starts[i], [shard], steps, batches)
            params[i] = own[0]
    return params, losses


def _node(context: Context) -> tuple[RunConfig, NodeClient]:
    # Nodes share a machine's cores, and one shard is too little work for several threads.
    torch.set_num_threads(1)
    config = make_config(context.run_config)
    return config, load_node_client(config, context.node_config)


@app.query()
def enrol(message: Message, context: Context) -> Message:
    """Answer which client this node holds, and how many examples it trains on, or that it cannot.

    Raises ValueError where the node does not even know its client.
    """
    try:
        _, client = _node(context)
    except ValueError as error:
        client_id = node_client_id(context.node_config)
        logger.error("client %d cannot take part in run %d: %s", client_id, context.run_id, error)
        return enrolment_refusal(message, client_id, str(error))
    return enrolment_reply(message, client.client_id, client.shard.num_examples)


@app.train()
def train(message: Message, context: Context) -> Message:
    """K local steps from the server's model on this node's shard."""
    config, client = _node(context)
    request = read_round(message)
    rule = check_rule(config, request)
    model = client.problem.model
    start = asked_start(request.arrays, model)
    key = (config.seed, request.server_round, client.client_id)
    if config.local_dp_sgd:
        params, losses = train_clients_privately(
            config, model, start, [client.shard], request.local_lr, [key]
        )
    else:
        params, losses = train_as_configured(
            config,
            model.on(training_device(config.device)),
            start,
            [client.shard],
            rule,
            [request],
            [key],
        )
    noised = noised_models(config, start, params, [request], [client.client_id])
    (arrays,) = trained_arrays(request.arrays, model, noised)
    (norm,) = trained_norms(config, rule, start, params, request.local_lr)
    spent = sample_epsilon(config, _rounds_trained(context, request.rounds_begun))
    count = client.shard.num_examples
    return train_reply(message, request, arrays, count, float(losses[0]), norm, spent)


def _rounds_trained(context: Context, rounds_begun: int) -> int:
    """An upper bound on the rounds this client has trained in, this one included.

    A node that was restarted, and one in a run that was resumed, has forgotten its count, and a
    server could repeat a round.
    """
    before = context.state.config_records.get(_TRAINED, ConfigRecord({"rounds": 0}))["rounds"]
    rounds = int(before) + 1 if isinstance(before, int) else 1
    context.state[_TRAINED] = ConfigRecord({"rounds": rounds})
    return max(rounds, rounds_begun)


@app.evaluate()
def evaluate_held_out(message: Message, context: Context) -> Message:
    """Accuracy and loss of the server's model on the examples this node never trains on."""
    _, client = _node(context)
    if client.held_out is None or len(client.held_out) == 0:
        raise ValueError("this node has no held-out examples to evaluate on")
    model = client.problem.model
    params = asked_start(read_model(message), model)
    metrics = evaluate(model.forgetting(), params, client.held_out)
    return evaluate_reply(message, len(client.held_out), metrics)


def main() -> None:
    """The program `flwr-clientapp` of a client that runs no code of the server's."""
    answer_with(app)
