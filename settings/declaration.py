"""How a key of the run configuration is declared: once, typed, with default, range and help.

Marks say who reads it, whether clients are sent it, whether it names a place, and when it may be
another. All that anybody asks of keys follows from these (`settings/key_facts.py`).
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from blackthorn.settings.own_code import is_own_code

Scalar = bool | int | float | str


class ConfigError(ValueError):
    """A wrong key or value in a run configuration; the message is one line for the user."""


@dataclass(frozen=True)
class Mark:
    """Something that holds of a key; its words are for whoever reads the declaration."""

    words: str


# No client reads it, and none is sent it.
SERVER = Mark("the server's business alone")
# Nothing that is computed hangs on where that is, and what is released does not name it.
PLACE = Mark("where on the server's machine something is")
# Nothing that the run computes hangs on it.
FREE = Mark(
    "a run that is resumed may have it otherwise, and chains of one posterior may differ in it"
)
OF_A_CHAIN = Mark("chains of one posterior may differ in it")
# Facts.keys of the algorithm's row in the catalogue.
BY_ALGORITHM = Mark("read by algorithms that name it as theirs")


@dataclass(frozen=True)
class Reader:
    """Who reads a key: whoever the key `chooser` chooses by one of `values`, or by any other
    (`other`). Of several any may; a key without is read by every run.
    """

    chooser: str
    values: tuple[Any, ...]
    other: bool = False


def by(chooser: str, *values: Any) -> Reader:
    """Read where the key `chooser` has one of `values`."""
    return Reader(chooser, values)


def unless(chooser: str, *values: Any) -> Reader:
    """Read where the key `chooser` has another value than `values`."""
    return Reader(chooser, values, other=True)


@dataclass(frozen=True)
class OneOf:
    """Of a key that holds a name: which there are, and whether FILE.py:NAME may stand for one of
    the user's own."""

    names: tuple[str, ...]
    own: bool = False

    @property
    def choices(self) -> list[str]:
        """What may be written."""
        return [*filter(None, self.names), *(["FILE.py:NAME"] if self.own else [])]

    def check(self, value: str) -> str:
        """The value itself. Raises ValueError for another name."""
        if value not in self.names and not (self.own and is_own_code(value)):
            names = [*map(repr, self.names), *(["your own FILE.py:NAME"] if self.own else [])]
            raise ValueError(f"should be {', '.join(names[:-1])} or {names[-1]}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Pydantic's: the check comes after that of the type."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))


def kebab(name: str) -> str:
    """The key of a field."""
    return name.replace("_", "-")


class KeyGroup(BaseModel):
    """Keys that belong together, written in kebab-case."""

    model_config = ConfigDict(
        alias_generator=kebab,
        populate_by_name=True,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
    )
