"""A round's rule as it travels, and a client's word that it carried it out.

The server sends the round's rule, a name and its numbers, with every train message; a client that
has carried it out puts an `Attestation` into its reply, which no message of the server holds. What
the server can enforce by itself it accepts from everybody. Where it cannot (noise that the clients
add, what they do to every step), a reply without the attestation does not count: the client knows
nothing of the rule, also where it gives back all that it was sent. A client that lies can make one,
so this keeps out clients that are unaware, not those that are hostile.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from blackthorn.wire import ATTESTED, RULE

_NAME = "name"
UNNAMED = "unnamed"  # what a server asks for that is not ours: no client carries it out


@dataclass(frozen=True)
class SentRule:
    """A rule's `name` and `numbers`, the same for all clients of a round; `local_rule.py` says what
    they mean.

    Raises ValueError for a name that is no text and a number that is none; infinity is one, for a
    bound that bounds nothing.
    """

    name: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"the rule's name is {self.name!r}: not a text")
        for key, value in self.numbers.items():
            if not isinstance(value, int | float) or math.isnan(value):
                raise ValueError(f"the rule {self.name} has {key} = {value!r}: not a number")
        object.__setattr__(self, "numbers", MappingProxyType(dict(self.numbers)))

    @classmethod
    def of(cls, content: RecordDict) -> "SentRule":
        """The rule that a message's content names; UNNAMED where it names none that can be read."""
        record = content.get(RULE)
        named = dict(record) if isinstance(record, ConfigRecord) else {}
        name: Any = named.pop(_NAME, UNNAMED)
        try:
            return cls(name, named)  # type: ignore[arg-type]
        except ValueError:
            return cls(UNNAMED)

    def record(self) -> ConfigRecord:
        """The rule as it travels, there and back. Whoever has many messages shares it."""
        return ConfigRecord({_NAME: self.name, **self.numbers})

    def __str__(self) -> str:
        numbers = ", ".join(f"{key} = {value:g}" for key, value in self.numbers.items())
        return f"{self.name} ({numbers})" if numbers else self.name


_WORDS = "this ClientApp has carried out the rule"


@dataclass(frozen=True)
class Attestation:
    """A client's word that it has carried out `rule` in a round, with all of its numbers.

    SHA-256 over both and words that only a ClientApp has that knows rules: whoever answers with
    what it was sent, of this round or another, does not answer with it.
    """

    rule: SentRule
    server_round: int

    @cached_property
    def record(self) -> ConfigRecord:
        """The attestation as it travels. Whoever has many replies shares it."""
        numbers = sorted((key, float(value)) for key, value in self.rule.numbers.items())
        said = repr((_WORDS, self.server_round, self.rule.name, numbers))
        return ConfigRecord({"sha256": hashlib.sha256(said.encode()).hexdigest()})

    def is_in(self, content: RecordDict) -> bool:
        """Whether a reply's content holds it."""
        record = content.get(ATTESTED)
        return isinstance(record, ConfigRecord) and record == self.record
