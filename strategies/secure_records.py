"""The messages of secure aggregation as records of Flower's, written by one side and read by the
other. What cannot be read is Refused: nothing else is raised, whatever is in a record."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from blackthorn.secure_aggregation.client import Shares
from blackthorn.secure_aggregation.key_agreement import Advertisement, Refused
from blackthorn.secure_aggregation.masks import Residues, dtype_of
from blackthorn.secure_aggregation.server import Standing
from blackthorn.wire import ARRAYS, SECURE

from .array_codec import encode, read_header

# The exchanges of a round, in their order.
KEYS, SHARES, MASKED, CONSISTENCY, UNMASK = EXCHANGES = (
    "keys",
    "shares",
    "masked",
    "consistency",
    "unmask",
)
_EXCHANGE, _SESSION = "exchange", "session"
_MASKED_ARRAY = "masked"

T = TypeVar("T")


def _reading(read: Callable[..., T]) -> Callable[..., T]:
    @wraps(read)
    def guarded(*arguments: Any) -> T:
        try:
            return read(*arguments)
        except Refused:
            raise
        # Whatever somebody has put there in place of what belongs there.
        except Exception as error:
            raise Refused(
                f"a message of secure aggregation cannot be read: {type(error).__name__}"
            ) from None

    return guarded


def asking(exchange: str, session: bytes, values: ConfigRecord | None = None) -> ConfigRecord:
    """What the server asks in an exchange, with what it tells beside."""
    return ConfigRecord({**(values or {}), _EXCHANGE: exchange, _SESSION: session})


@_reading
def asked(content: RecordDict) -> tuple[str, bytes, ConfigRecord]:
    """Which exchange, which session, and all that is told."""
    record = content.config_records[SECURE]
    exchange, session = record[_EXCHANGE], record[_SESSION]
    if exchange not in EXCHANGES or not isinstance(session, bytes):
        raise Refused("the message is of no exchange of secure aggregation")
    return str(exchange), session, record


def keys_record(told: Advertisement) -> ConfigRecord:
    """A client's own keys."""
    return ConfigRecord(
        {"sealing": told.sealing, "masking": told.masking, "signature": told.signature}
    )


@_reading
def read_keys(client: int, record: ConfigRecord) -> Advertisement:
    """Those of `client`."""
    return Advertisement(client, *_bytes(record, "sealing", "masking", "signature"))


def neighbours_record(neighbours: list[Advertisement]) -> ConfigRecord:
    """The keys of a client's neighbours."""
    return ConfigRecord(
        {
            "clients": [one.client for one in neighbours],
            "sealing": [one.sealing for one in neighbours],
            "masking": [one.masking for one in neighbours],
            "signatures": [one.signature for one in neighbours],
        }
    )


@_reading
def read_neighbours(record: ConfigRecord) -> list[Advertisement]:
    """What `neighbours_record` wrote."""
    columns = (_list(record, name, bytes) for name in ("sealing", "masking", "signatures"))
    return [
        Advertisement(*one) for one in zip(_list(record, "clients", int), *columns, strict=True)
    ]


def shares_record(given: Shares) -> ConfigRecord:
    """A client's shares for its neighbours."""
    return ConfigRecord({**_by_client(given.sealed), "commitment": given.commitment})


@_reading
def read_shares(record: ConfigRecord) -> Shares:
    """What `shares_record` wrote."""
    (commitment,) = _bytes(record, "commitment")
    return Shares(read_by_client(record), commitment)


def _by_client(values: Mapping[int, bytes]) -> ConfigRecord:
    return ConfigRecord({"clients": [*values], "values": [*values.values()]})


# Sealed shares and tags on their way to a client, tags that one gives, and shares that it reveals.
by_client_record = _by_client


@_reading
def read_by_client(record: ConfigRecord) -> dict[int, bytes]:
    """Bytes by client."""
    clients, values = _list(record, "clients", int), _list(record, "values", bytes)
    if len({*clients}) < len(clients):
        raise Refused("a message of secure aggregation names a client twice")
    return dict(zip(clients, values, strict=True))


def standing_record(standing: Standing) -> ConfigRecord:
    """Who is in the sum, and who is gone."""
    return ConfigRecord({"alive": standing.alive, "gone": standing.gone})


@_reading
def read_standing(record: ConfigRecord) -> Standing:
    """What `standing_record` wrote."""
    return Standing(_list(record, "alive", int), _list(record, "gone", int))


def masked_arrays(vector: Residues) -> ArrayRecord:
    """A masked vector, in place of the model."""
    return ArrayRecord({_MASKED_ARRAY: encode(vector)})


@_reading
def read_masked(content: RecordDict, length: int, bits: int) -> Residues:
    """The masked vector [`length`] in a reply, of which no more is taken than it has to have."""
    import numpy as np

    data, dtype = content.array_records[ARRAYS][_MASKED_ARRAY].data, dtype_of(bits)
    header, shape, _, found = read_header(data)
    if shape != (length,) or found != dtype or len(data) != header + length * dtype.itemsize:
        raise Refused(f"the masked update has not the form {dtype} [{length}]")
    return np.frombuffer(data, dtype, offset=header)


def _bytes(record: ConfigRecord, *names: str) -> list[bytes]:
    values = [record[name] for name in names]
    if not all(isinstance(value, bytes) for value in values):
        raise Refused("a message of secure aggregation has no bytes where they belong")
    return values  # type: ignore[return-value]


def _list(record: ConfigRecord, name: str, kind: type[T]) -> list[T]:
    values = record[name]
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise Refused(f"a message of secure aggregation has no list of {name}")
    return values  # type: ignore[return-value]
