"""What the ClientApp reads from the server's messages, and what it answers (Flower's usual form).

A reply holds one ArrayRecord "arrays" with the model's state_dict, one MetricRecord "metrics"
with num-examples, and the ConfigRecord "attested" of the rule that was carried out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from blackthorn.strategies.array_codec import decode, encode
from blackthorn.strategies.attestation import Attestation, SentRule
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.wire import (
    ARRAYS,
    ATTESTED,
    CLAIM,
    CLIENT_ID,
    CONFIG,
    LOCAL_LR,
    MEMORY,
    METRICS,
    NONCE,
    NUM_EXAMPLES,
    POISON,
    PROBLEM,
    ROUNDS_BEGUN,
    SAMPLE_EPSILON,
    SEED,
    SERIES,
    SERVER_ROUND,
    UPDATE_NORM,
)

_NO_RECORDS = RecordDict()
# What a round's config has whatever the algorithm; the rest is told to single clients.
_OF_ALL = {SERVER_ROUND, LOCAL_LR, ROUNDS_BEGUN, CLIENT_ID, SEED, SERIES, NONCE, POISON}


@dataclass(frozen=True)
class RoundRequest:
    """A round's instruction: the global model and what changes from round to round.

    `rounds_begun`: how often clients have been asked to train, which in a resumed run is more often
    than there are rounds. `rule` is the client's half of the algorithm, `told` what the server
    tells this client beside, and `memory` [d] what it keeps for it; `kept` [d] is what the client
    has kept itself, which no message holds. `claimed`: whether the server claims its clients'
    privacy.
    """

    server_round: int
    local_lr: float
    arrays: ArrayRecord
    rule: SentRule
    rounds_begun: int = 0
    told: Mapping[str, float] = field(default_factory=dict)
    memory: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    claimed: bool = False

    @cached_property
    def attestation(self) -> ConfigRecord:
        """What a client answers that has carried out the round's rule."""
        return Attestation(self.rule, self.server_round).record


def read_round(message: Message) -> RoundRequest:
    """The instruction in a train message. Raises KeyError if it is not one of ours."""
    config = message.content[CONFIG]
    if not isinstance(config, ConfigRecord):
        raise KeyError("the message has no config")
    server_round = int(_number(config[SERVER_ROUND]))
    return RoundRequest(
        server_round=server_round,
        local_lr=float(_number(config.get(LOCAL_LR, 1.0))),
        arrays=read_model(message),
        rule=SentRule.of(message.content),
        rounds_begun=max(server_round, int(_number(config.get(ROUNDS_BEGUN, 0)))),
        told=_told(message),
        memory=_memory(message),
        claimed=claims_clients(message),
    )


def claims_clients(message: Message) -> bool:
    """Whether a train message, or the question who a node is, comes of a server that claims its
    clients' privacy."""
    return message.content.config_records.get(CONFIG, ConfigRecord()).get(CLAIM) == "client"


def series_of(message: Message) -> str:
    """By what a node keeps something from round to round: what another strategy of the same run has
    left there, or the same one with another model, is not these rounds'."""
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    return str(config.get(SERIES, ""))


def _told(message: Message) -> dict[str, float]:
    config = message.content.config_records[CONFIG]
    own = [key for key in config if key not in _OF_ALL]
    return {key: value for key in own if isinstance(value := config[key], int | float)}


def _memory(message: Message) -> torch.Tensor | None:
    record = message.content.get(MEMORY)
    if not isinstance(record, ArrayRecord):
        return None
    return torch.from_numpy(decode(record[MEMORY]))


def read_model(message: Message) -> ArrayRecord:
    """The global model in a train or evaluate message. Raises KeyError where there is none."""
    arrays = message.content[ARRAYS]
    if not isinstance(arrays, ArrayRecord):
        raise KeyError("the message has no arrays")
    return arrays


def read_rounds(messages: Sequence[Message]) -> list[RoundRequest]:
    """The instructions in the train messages of one round, which differ in what the server tells
    single clients alone. Raises KeyError if they are not ours."""
    first = read_round(messages[0])
    if not first.told and first.memory is None:
        return [first] * len(messages)
    return [replace(first, told=_told(message), memory=_memory(message)) for message in messages]


def _number(value: object) -> int | float:
    if isinstance(value, int | float):
        return value
    raise ValueError(f"the round's config holds {value!r} where a number belongs")


def start_vector(arrays: ArrayRecord, model: FlatModel) -> torch.Tensor:
    """w_t [d] from the server's arrays, in the order and the dtypes of the model.

    Raises ValueError where a parameter is missing, or has another shape or dtype.
    """
    state = {name: torch.from_numpy(decode(array)) for name, array in arrays.items()}
    vector = model.flatten(state)
    for name, dtype in zip(model.names, model.dtypes, strict=True):
        if state[name].dtype != dtype:
            raise ValueError(f"parameter {name!r} is {state[name].dtype}: allowed is {dtype}")
    return vector


def trained_arrays(
    arrays: ArrayRecord,
    model: FlatModel,
    trained: torch.Tensor,
    write: Callable[[np.ndarray], Array] = encode,
) -> list[ArrayRecord]:
    """Each client's state_dict: w from its row of `trained` [B, d], all other entries as the
    server sent them. `write` makes a parameter's Array; HeldArray, where nothing leaves the
    process, forbids that `trained` changes afterwards."""
    views = {name: view.numpy() for name, view in model.unflatten(trained).items()}
    records = [arrays.copy() for _ in range(len(trained))]
    for client, record in enumerate(records):
        for name, view in views.items():
            record[name] = write(view[client])
    return records


def train_reply(
    message: Message,
    request: RoundRequest,
    arrays: ArrayRecord,
    num_examples: int,
    train_loss: float | None,
    update_norm: float | None = None,
    sample_epsilon: float | None = None,
) -> Message:
    """The reply to a train message, which attests the rule of its ``request``: for clients that
    carried it out. `disclosed` decides what of it is sent.

    `update_norm` is ‖u_i‖ in gradient units before the client clipped its update, for the
    server's instruments; None where it did not clip. `sample_epsilon` is what one of the client's
    examples has spent in local DP-SGD.
    """
    # Copies take a fraction of what Flower's constructor does, and of setting an entry.
    metrics = _counted(num_examples).copy()
    if train_loss is not None:
        metrics["train-loss"] = train_loss
    if update_norm is not None:
        metrics[UPDATE_NORM] = update_norm
    if sample_epsilon is not None:
        metrics[SAMPLE_EPSILON] = sample_epsilon
    content = _NO_RECORDS.copy()
    content[ARRAYS], content[METRICS] = arrays, metrics
    content[ATTESTED] = request.attestation
    return Message(content, reply_to=message)


@lru_cache(maxsize=256)
def _counted(num_examples: int) -> MetricRecord:
    return MetricRecord({NUM_EXAMPLES: num_examples})


def evaluate_reply(message: Message, num_examples: int, metrics: Mapping[str, float]) -> Message:
    """The reply to an evaluate message."""
    record = MetricRecord({NUM_EXAMPLES: num_examples, **metrics})
    return Message(RecordDict({METRICS: record}), reply_to=message)


def enrolment_reply(message: Message, client_id: int, num_examples: int) -> Message:
    """The answer to the server's question which client this node holds."""
    record = MetricRecord({CLIENT_ID: client_id, NUM_EXAMPLES: num_examples})
    return Message(RecordDict({METRICS: record}), reply_to=message)


def enrolment_refusal(message: Message, client_id: int, problem: str) -> Message:
    """The answer of a node whose client cannot take part: an error reply would not name it."""
    metrics, config = MetricRecord({CLIENT_ID: client_id}), ConfigRecord({PROBLEM: problem})
    return Message(RecordDict({METRICS: metrics, CONFIG: config}), reply_to=message)
