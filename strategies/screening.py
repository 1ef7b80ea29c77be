"""Every reply is decoded and checked on its own: what is in it must never hurt the round.

A header can lie, so nothing is believed that was not checked on the payload itself.
"""

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from blackthorn.flower_port.grids import MESSAGE_UNAVAILABLE, NO_REPLY, NODE_UNAVAILABLE
from blackthorn.flower_port.pulling import UNFINISHED
from blackthorn.flower_port.transports import LATE, UNSENT, Delivery
from blackthorn.wire import ATTESTED, NUM_EXAMPLES, RULE

from .array_codec import NUMPY, HeldArray, read_header
from .attestation import Attestation
from .global_model import GlobalModel, ModelLayout
from .layout import VARIANCE
from .local_rule import how_to_attest

MAX_EXAMPLES = 10**12
# Rules take products of up to four updates in float64; every float32 is far below this.
MAX_UPDATE = 1e70

# What Flower makes of an exception on the client, `<class 'a.b.C'>:<'its text'>`; Python writes
# C: its text.
_EXCEPTION = re.compile(r"\A<class '(?:[^']*\.)?([^'.]+)'>:<'(.*)'>\Z", re.DOTALL)

_IN_SIMULATION = "Exception ClientAppException occurred. Message: "


class RejectedReply(ValueError):
    """A reply that does not count; the message is the reason."""


@dataclass(frozen=True)
class Contribution:
    """What one client's reply brings: its update u_i [d] in gradient units, and its count."""

    update: torch.Tensor
    num_examples: int | None
    metrics: dict[str, float]
    # Running statistics [s], float64, where clients send them back.
    statistics: np.ndarray = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Rejection:
    """A client of the cohort whose reply did not count, and why.

    `replied`: whether there was a reply of its own at all (`reason` says it in words).
    """

    client: int
    reason: str
    replied: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Screened:
    """What a round's replies came to, each by ascending client.

    Contributions by client id, with their updates as the rows of `updates` [K, d]; the rejected
    with their reasons; and the surplus, for whom nobody waited any more. `seconds` it took.
    """

    contributions: dict[int, Contribution]
    updates: torch.Tensor
    rejected: list[Rejection]
    surplus: list[int]
    seconds: float

    @property
    def statistics(self) -> np.ndarray:
        """The contributions' running statistics [K, s], float64."""
        rows = [own.statistics for own in self.contributions.values()]
        return np.stack(rows) if rows else np.empty((0, 0))


class Screening:
    """Screens what comes back from a round's `clients`, each once, in whatever order it comes.

    `attested`: the attestation without which a reply does not count. Every update is written once,
    into its row of one matrix.
    """

    def __init__(
        self,
        clients: Sequence[int],
        model: GlobalModel,
        local_lr: float,
        attested: Attestation | None = None,
    ) -> None:
        self._model = model
        self._local_lr = local_lr
        self._attested = attested
        self._places = {client: place for place, client in enumerate(sorted(clients))}
        # Memory is taken up by the rows that are written to.
        self._rows = model.current.new_empty(len(self._places), len(model.current))
        self._found: dict[int, Contribution | Rejection] = {}
        self._seconds = 0.0

    def counts(self, delivery: Delivery) -> bool:
        """Screen one delivery; whether it counts."""
        began = time.monotonic()
        found = self._found[delivery.client] = self._screen(delivery)
        self._seconds += time.monotonic() - began
        return isinstance(found, Contribution)

    def result(self, deliveries: Iterable[Delivery]) -> Screened:
        """What all `deliveries` came to, one a client; those not seen yet are screened now."""
        surplus = []
        for delivery in deliveries:
            if delivery.surplus:
                surplus.append(delivery.client)
            elif delivery.client not in self._found:
                self.counts(delivery)
        contributions: dict[int, Contribution] = {}
        rejected = []
        for client in sorted(self._found):
            found = self._found[client]
            if isinstance(found, Rejection):
                rejected.append(found)
                continue
            # The rows close up to the front: none is overwritten that has not moved yet.
            row, place = self._rows[len(contributions)], self._places[client]
            if place != len(contributions):
                row.copy_(self._rows[place])
            contributions[client] = replace(found, update=row)
        return Screened(
            contributions,
            self._rows[: len(contributions)],
            rejected,
            sorted(surplus),
            self._seconds,
        )

    def _screen(self, delivery: Delivery) -> Contribution | Rejection:
        try:
            if delivery.message is None:
                raise RejectedReply(delivery.problem)
            row = self._rows[self._places[delivery.client]]
            return screen_reply(delivery.message, self._model, self._local_lr, row, self._attested)
        except RejectedReply as rejection:
            return Rejection(delivery.client, one_line(str(rejection)), replied(delivery))
        except Exception as error:  # what screening did not think of must not end the round
            reason = f"the reply cannot be read: {type(error).__name__}: {error}"
            return Rejection(delivery.client, one_line(reason))


def replied(delivery: Delivery) -> bool:
    """Whether there was a reply of the client's own at all."""
    message = delivery.message
    if message is None:
        return delivery.problem not in (LATE, UNSENT, UNFINISHED)
    return not (message.has_error() and message.error.code in NO_REPLY)


def screen_reply(
    message: Message,
    model: GlobalModel,
    local_lr: float,
    row: torch.Tensor | None = None,
    attested: Attestation | None = None,
) -> Contribution:
    """Decode a training reply, check it against the global model and form the update, in `row`
    [d] where one is given.

    Raises RejectedReply for an error reply, one without the attestation `attested` where one
    is given, missing, extra or misshapen entries, a payload that differs from its header, a
    wrong dtype, a value that is not finite (also after the division by the learning rate), or an
    insane count. Raises nothing else, whatever is in the reply.
    """
    content = content_of(message)
    if attested is not None:
        _check_attestation(content, attested)
    records = [record for record in content.values() if isinstance(record, ArrayRecord)]
    if len(records) != 1:
        raise RejectedReply(f"{len(records)} array records in the reply, expected 1")
    state = decode_state(records[0], model.layout)
    update = model.update_of_state(state, local_lr, row)
    low, high = map(float, torch.aminmax(update))
    if not -MAX_UPDATE <= low <= high <= MAX_UPDATE:  # false for NaN too
        if not bool(torch.isfinite(model.layout.flatten(state)).all()):
            raise RejectedReply("the model has values that are not finite")
        raise RejectedReply("the update is too large for its precision")
    statistics = model.layout.statistics(state)
    if len(statistics):
        _check_statistics(state, model.layout)
    return Contribution(update, read_count(content), scalar_metrics(content), statistics)


def _check_statistics(state: dict[str, np.ndarray], layout: ModelLayout) -> None:
    for name in layout.averaged:
        if not np.isfinite(state[name]).all():
            raise RejectedReply(f"the statistic {name!r} has values that are not finite")
        if name.endswith(VARIANCE) and (state[name] < 0).any():
            raise RejectedReply(f"the statistic {name!r} is a variance below 0")


def content_of(message: Message) -> RecordDict:
    """The reply's content. Raises RejectedReply if the client answered with an error."""
    if message.has_error():
        if message.error.code == MESSAGE_UNAVAILABLE:
            raise RejectedReply(LATE)
        if message.error.code == NODE_UNAVAILABLE:
            raise RejectedReply("its node is no longer connected")
        told = _EXCEPTION.sub(r"\1: \2", message.error.reason or "").removesuffix(": ")
        # In Flower's simulation a traceback stands before it.
        reason = told.rpartition(_IN_SIMULATION)[2].strip() or "no reason given"
        raise RejectedReply(f"error {message.error.code}: {reason}")
    if not message.has_content():
        raise RejectedReply("the reply is empty")
    return message.content


def _check_attestation(content: RecordDict, attested: Attestation) -> None:
    if attested.is_in(content):
        return
    if ATTESTED in content:
        said = "attests another rule or round than"
    elif RULE in content:
        said = "gives back, which attests nothing,"
    else:
        said = "attests nothing of"
    raise RejectedReply(
        f"the reply {said} the round's rule {attested.rule}, which the clients must carry out: "
        f"{how_to_attest(attested.rule)}"
    )


def decode_state(record: ArrayRecord, layout: ModelLayout) -> dict[str, np.ndarray]:
    """The entries of `record` that were sent, checked against `layout`; what did not travel may be
    there too. Raises RejectedReply."""
    missing = [name for name in layout.sent if name not in record]
    extra = [name for name in record if name not in layout.shapes]
    if missing:
        raise RejectedReply(f"missing entry {missing[0]!r} ({len(missing)} missing)")
    if extra:
        raise RejectedReply(f"unexpected entry {extra[0][:80]!r} ({len(extra)} unexpected)")
    return {
        name: _decode_array(name, record[name], layout.shapes[name], layout.dtypes[name])
        for name in layout.sent
    }


def _decode_array(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Decode one .npy payload without allocating what its header merely promises."""
    if array.stype != NUMPY:
        raise RejectedReply(f"{name}: unknown serialisation {array.stype[:40]!r}")
    held = array.value if isinstance(array, HeldArray) else None
    if held is not None:
        _check_form(name, held.dtype, held.shape, dtype, shape)
        return held
    try:
        header, real_shape, fortran, real_dtype = read_header(array.data)
    # What is no usual header NumPy's reader evaluates as Python: a hostile one ends in an
    # IndexError, a TokenError, a RecursionError, ...
    except Exception:
        raise RejectedReply(f"{name}: the payload is not a NumPy array") from None
    _check_form(name, real_dtype, real_shape, dtype, shape)
    body = memoryview(array.data)[header:]
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise RejectedReply(f"{name}: {len(body)} bytes of data do not fit shape {shape}")
    flat = np.frombuffer(body, dtype=dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _check_form(
    name: str,
    real_dtype: np.dtype,
    real_shape: tuple[int, ...],
    dtype: np.dtype,
    shape: tuple[int, ...],
) -> None:
    if real_dtype != dtype:
        raise RejectedReply(f"{name}: dtype {_shown(real_dtype)}, expected {dtype}")
    if real_shape != shape:
        raise RejectedReply(f"{name}: shape {_shown(real_shape)}, expected {shape}")


def _shown(value: object) -> str:
    """`value` as text for a reason, cut short; Python refuses to write very long integers."""
    try:
        text = str(value)
    except ValueError:
        return "beyond all measure"
    return text if len(text) <= 80 else f"{text[:80]}..."


def scalar_metrics(content: RecordDict) -> dict[str, float]:
    """All scalar numbers in the reply's metric records, by name, but for its count."""
    return {
        key: _as_float(value)
        for record in _metric_records(content)
        for key, value in record.items()
        if isinstance(value, int | float) and key != NUM_EXAMPLES
    }


def read_count(content: RecordDict) -> int | None:
    """The reply's number of examples, None where it has none.

    Raises RejectedReply unless it is a number from 1 to 10^12.
    """
    for record in _metric_records(content):
        value = record.get(NUM_EXAMPLES)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise RejectedReply(f"{NUM_EXAMPLES} = {_shown(value)} is not a number")
        count = _as_float(value)
        if not 1 <= count <= MAX_EXAMPLES:  # false for NaN too
            raise RejectedReply(f"{NUM_EXAMPLES} = {count:g} is not a count from 1 to 10^12")
        return int(count)
    return None


def _metric_records(content: RecordDict) -> list[MetricRecord]:
    return [record for record in content.values() if isinstance(record, MetricRecord)]


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def one_line(text: str) -> str:
    """`text` from a client, fit for a log and a terminal: one line, printable, not long."""
    printable = "".join(c if c.isprintable() else " " for c in text[:1000])
    line = " ".join(printable.split())
    return line if len(line) <= 300 else f"{line[:300]}..."
