"""The attacks by name, in three kinds.

* "vector": another update in place of the honest one (`VectorAttack`);
* "data": honest training on poisoned data (`DataAttack`);
* "reply": another reply, or none, whatever was learnt (`ReplyAttack`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flwr.app import Message
from torch import Tensor, as_tensor

from blackthorn.settings.own_code import failure, is_own_code, own_function

from . import distance_attacks, vector_attacks
from .adaptive import ServerRule, adaptive
from .misbehaviour import REPLY_ATTACKS
from .vector_attacks import VectorFunction

Kind = Literal["vector", "data", "reply"]


@dataclass(frozen=True)
class VectorAttack:
    """own [b, d] -> [b, d]; see `vector_attacks` for the arguments.

    shared_randomness: all corrupt clients of a round use the same random vector; asks_the_rule:
    it is called with what the server makes of a round, as `rule`.
    """

    name: str
    function: VectorFunction
    shared_randomness: bool = False
    asks_the_rule: bool = False
    kind: Literal["vector"] = "vector"

    def __call__(
        self,
        own: Tensor,
        *,
        num_clients: int,
        generator: np.random.Generator,
        honest: Tensor | None = None,
        rule: ServerRule | None = None,
    ) -> Tensor:
        """The colluders' vectors, gradient units, shape and dtype of `own`.

        ValueError where the attack asks the server's rule and there is none.
        """
        if not self.asks_the_rule:
            return self.function(own, num_clients=num_clients, generator=generator, honest=honest)
        if rule is None:
            raise ValueError(f"attack {self.name} needs the server's rule, and was given none")
        return self.function(
            own, num_clients=num_clients, generator=generator, honest=honest, rule=rule
        )


class OwnAttackFailed(RuntimeError):
    """A user's own attack raised, or gave something else than vectors; the message is one line."""


def own_attack(name: str) -> VectorAttack:
    """The user's own FILE.py:FUNCTION; called, OwnAttackFailed for whatever is wrong with it."""
    function = own_function(name)

    def checked(own: Tensor, **arguments: Any) -> Tensor:
        try:
            vectors = as_tensor(function(own, **arguments)).to(own.dtype)
        except Exception as error:
            raise OwnAttackFailed(failure(name, error)) from error
        if vectors.shape != own.shape:
            shape, expected = tuple(vectors.shape), tuple(own.shape)
            raise OwnAttackFailed(f"{name} gave an array of shape {shape}, expected {expected}")
        return vectors

    return VectorAttack(name, checked)


def flip_labels(y: Tensor, num_classes: int) -> Tensor:
    """Poisoned labels num_classes - 1 - y, shape and dtype of `y`, which is left as it is.

    Raises ValueError for num_classes below 1.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; allowed are 1 and above")
    return num_classes - 1 - y


@dataclass(frozen=True)
class DataAttack:
    """(labels, number of classes) -> the labels the corrupt client trains on."""

    name: str
    function: Callable[[Tensor, int], Tensor]
    kind: Literal["data"] = "data"

    def __call__(self, y: Tensor, num_classes: int) -> Tensor:
        """The poisoned labels, shape and dtype of `y`."""
        return self.function(y, num_classes)


@dataclass(frozen=True)
class ReplyAttack:
    """Honest reply -> what is sent instead; see `misbehaviour`.

    absence: what a server sees of a client that does not answer: "error" where the client's
    failure is reported to it, "silence" where nothing comes; None for attacks that answer.
    """

    name: str
    function: Callable[[Message], Message]
    absence: Literal["error", "silence"] | None = None
    kind: Literal["reply"] = "reply"

    def __call__(self, reply: Message) -> Message:
        """The forged reply, or the side effect (an exception, a delay, the process's end)."""
        return self.function(reply)


Attack = VectorAttack | DataAttack | ReplyAttack

_VECTORS: dict[str, VectorFunction] = {
    "random-gradient": vector_attacks.random_gradient,
    "reverse-average": vector_attacks.reverse_average,
    "gradient-shift": vector_attacks.gradient_shift,
    "all-ones": vector_attacks.all_ones,
    "baruch": vector_attacks.baruch,
    "reverse-scaled-average": vector_attacks.reverse_scaled_average,
    "sign-flip": vector_attacks.sign_flip,
    "inner-product": vector_attacks.inner_product,
    "mimic": vector_attacks.mimic,
    "min-max": distance_attacks.min_max,
    "min-sum": distance_attacks.min_sum,
    "adaptive": adaptive,
}
_SHARED_RANDOMNESS = {"gradient-shift"}
_ASKS_THE_RULE = {"adaptive"}
_ABSENCES: dict[str, Literal["error", "silence"]] = {
    "raise": "error",
    "slow": "silence",
    "exit": "silence",
}

_ATTACKS: dict[str, Attack] = {
    **{
        name: VectorAttack(name, function, name in _SHARED_RANDOMNESS, name in _ASKS_THE_RULE)
        for name, function in _VECTORS.items()
    },
    "label-flip": DataAttack("label-flip", flip_labels),
    **{
        name: ReplyAttack(name, function, _ABSENCES.get(name))
        for name, function in REPLY_ATTACKS.items()
    },
}


def names(kind: Kind | None = None) -> tuple[str, ...]:
    """All attacks' names, or those of one kind."""
    return tuple(name for name, attack in _ATTACKS.items() if kind in (None, attack.kind))


def get(name: str) -> Attack:
    """The attack called `name`; ValueError with the names there are for any other.

    FILE.py:FUNCTION is a vector attack of the user's own, with the arguments of `vector_attacks`.
    """
    if is_own_code(name):
        return own_attack(name)
    try:
        return _ATTACKS[name]
    except KeyError:
        raise ValueError(f"attack is {name!r}; allowed are {', '.join(_ATTACKS)}") from None
