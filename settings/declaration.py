"""How a key of the run configuration is declared: once, typed, with default, range and help."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from blackthorn.settings.own_code import is_own_code

Scalar = bool | int | float | str


class ConfigError(ValueError):
    """A wrong key or value in a run configuration; the message is one line for the user."""


@dataclass(frozen=True)
class Owner:
    """Whose business a key is. One without an owner is read by the server and by the clients."""

    name: Literal["server"]


SERVER = Owner("server")


@dataclass(frozen=True)
class OneOf:
    """Of a key that holds a name: which there are, and whether FILE.py:NAME may stand for one of
    the user's own."""

    names: tuple[str, ...]
    own: bool = False

    @property
    def choices(self) -> list[str]:
        """What may be written."""
        return [*self.names, *(["FILE.py:NAME"] if self.own else [])]

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


@dataclass(frozen=True)
class Place:
    """Marks a key whose value is a place on the machine that runs the server, or where it stores
    what: nothing that is computed hangs on it, and what is released does not name it."""


PLACE = Place()


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
