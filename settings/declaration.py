"""How a key of the run configuration is declared: once, typed, with default, range and help."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

Scalar = bool | int | float | str


class ConfigError(ValueError):
    """A wrong key or value in a run configuration; the message is one line for the user."""


@dataclass(frozen=True)
class Owner:
    """Whose business a key is. One without an owner is read by the server and by the clients."""

    name: Literal["server"]


SERVER = Owner("server")


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
