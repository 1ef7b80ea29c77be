"""The ClientApp: one node's client trains, evaluates, and says who it is."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from blackthorn.flower_port.programs import answer_with
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.settings.derived import chain_seed, trains_alone
from blackthorn.settings.own_code import is_own_code
from blackthorn.settings.privacy_checks import claims_privacy
from blackthorn.strategies.local_rule import LocalRule, LocalSGD, LocalSteps
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.global_generators import global_generators_kept, seed_global_generators
from blackthorn.tasks.shards import Shard

from .configured_rule import asked_start, check_rule
from .disclosure import disclosing
from .dp_sgd import sample_epsilon, train_clients_privately
from .masking import masking
from .messages import (
    RoundRequest,
    enrolment_refusal,
    enrolment_reply,
    read_round,
    series_of,
    train_reply,
    trained_arrays,
)
from .node_data import (
    NodeClient,
    keep_update,
    kept_update,
    load_node_client,
    node_client_id,
)
from .permitting import permitting
from .private_update import noised_models, rounds_of
from .trained_alone import evaluate_alone, train_alone
from .training import ClientGenerators, own_code_seed, train_clients, training_device

_TRAINED = "rounds-trained"

logger = logging.getLogger("blackthorn.clients")

app = ClientApp(mods=[masking, permitting, disclosing])


@dataclass(frozen=True)
class LocalRound:
    """What is trained in a round, of clients side by side: from `start` w_t [d], or [B, d], by
    `rule`, each on its own of the `shards`. `requests`: what the server asks of each; `keys`: the
    seed, round and client of their generators."""

    rule: LocalRule
    start: Tensor
    shards: Sequence[Shard]
    requests: Sequence[RoundRequest]
    keys: Sequence[tuple[int, int, int]]

    @property
    def clients(self) -> list[int]:
        """Who trains."""
        return [client for _, _, client in self.keys]

    def alone(self, row: int) -> "LocalRound":
        """That of one client."""
        start = self.start.expand(len(self.keys), -1)[row]
        own = slice(row, row + 1)
        return LocalRound(self.rule, start, self.shards[own], self.requests[own], self.keys[own])


def local_training(config: RunConfig, work: LocalRound) -> LocalSteps:
    """The local training in a round, as the run configuration and the rule say."""
    sgd = LocalSGD(
        steps=config.local_steps,
        batch_size=config.batch_size,
        learning_rate=work.requests[0].local_lr,
        weight_decay=config.weight_decay,
        rule=work.rule,
    )
    round_of = rounds_of(config, work.requests, work.clients)
    return work.rule.steps(sgd, len(work.keys), round_of)


def trained_norms(config: RunConfig, work: LocalRound, params: Tensor) -> list[float | None]:
    """What the B clients say of their models for the server's instruments, where it has any."""
    if not config.instruments:
        return [None] * len(params)
    return work.rule.trained_norms(work.start, params, work.requests[0].local_lr)


def train_as_configured(
    config: RunConfig, model: FlatModel, work: LocalRound
) -> tuple[Tensor, Tensor]:
    """`train_clients`, by the steps of the rule.

    Under a central claim a model of one's own, or of a task of one's own, which may draw random
    numbers or remember in `forward`, is trained for each client apart: one client's being there
    must move no other's update.
    """
    own = is_own_code(config.model) or is_own_code(config.task)
    if own and claims_privacy(config):
        return _train_apart(config, model, work)
    steps, batches = local_training(config, work), ClientGenerators(work.keys)
    return train_clients(model, work.start, work.shards, steps, batches)


def _train_apart(config: RunConfig, model: FlatModel, work: LocalRound) -> tuple[Tensor, Tensor]:
    """Each client with a copy of the module as it was loaded, and global generators of its own."""
    num_clients, dimension = len(work.keys), work.start.shape[-1]
    params = work.start.new_empty(num_clients, dimension)
    losses = work.start.new_empty(num_clients)
    for i, key in enumerate(work.keys):
        own, batches = work.alone(i), ClientGenerators([key])
        steps = local_training(config, own)
        with global_generators_kept(model.device):
            seed_global_generators(own_code_seed(*key), model.device)
            trained, loss = train_clients(model.copy(), own.start, own.shards, steps, batches)
        params[i], losses[i] = trained[0], loss[0]
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
    if trains_alone(config):
        alone = client.problem, client.client_id, client.shard
        return train_alone(config, *alone, message, context)
    request = replace(read_round(message), kept=kept_update(context, series_of(message)))
    rule = check_rule(config, request)
    model = client.problem.model
    start = asked_start(request.arrays, model)
    key = (chain_seed(config), request.server_round, client.client_id)
    work = LocalRound(rule, start, [client.shard], [request], [key])
    if config.local_dp_sgd:
        params, losses = train_clients_privately(
            config, model, start, work.shards, request.local_lr, work.keys
        )
    else:
        own_device = model.on(training_device(config.device))
        params, losses = train_as_configured(config, own_device, work)
    noised = noised_models(config, start, params, work.requests, work.clients)
    keep_update(context, series_of(message), rule.to_keep(start, noised, request.local_lr))
    (arrays,) = trained_arrays(request.arrays, model, noised)
    (norm,) = trained_norms(config, work, params)
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
    return evaluate_alone(client.problem, client.held_out, message, context)


def main() -> None:
    """The program `flwr-clientapp` of a client that runs no code of the server's."""
    answer_with(app)
