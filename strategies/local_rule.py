"""The client's half of an algorithm: what becomes of a step's gradient, what a step is, and what
becomes of the update before it is sent. Pure functions on tensors, whoever calls them: our
ClientApp, the in-process engine, or anybody's ClientApp that was sent the rule.

A rule is its name and its numbers, which travel (`attestation.py: SentRule`). The catalogue says
which class a name means, so that nothing but the message is needed to carry a rule out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Protocol, Self

import numpy as np
from torch import Tensor

from blackthorn.settings.catalogue import LOCAL_RULES, load
from blackthorn.settings.declaration import kebab

from .attestation import SentRule
from .bounding import row_norms
from .noise import Randomness

# The functions below give their callers' tensors back where a rule leaves them as they are.


class LocalSteps(Protocol):
    """A round's local training: K steps, the size of a batch, and what a step does."""

    @property
    def steps(self) -> int:
        """K, at least 1."""

    @property
    def batch_size(self) -> int:
        """Examples a step; 0: all that the client has."""

    def move(
        self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int], start: Tensor
    ) -> None:
        """Step ``step`` (from 0), in place on the models ``params`` [R, d] of ``clients``, which
        are positions among all that are trained; ``gradients`` [R, d] may be changed. ``start`` is
        w_t [d], or [R, d] where each has its own, and stays as it is.

        A group of clients makes all its steps before the next group begins, each group in its own
        order: what is kept from one step to the next has to be kept by client.
        """


@dataclass(frozen=True)
class ClientRound:
    """What a rule may know of one client in a round.

    told: the numbers that the server tells it beside the model, by their names in `wire`; memory: a
        vector [d] that the server keeps for it, where the algorithm has one; kept: the one that it
        has kept itself in the last round that it took part in.
    generator: of noise for which no privacy is claimed. randomness: of noise that a claim rests on.
    """

    client: int
    server_round: int
    told: Mapping[str, float]
    memory: Tensor | None
    generator: Callable[[], np.random.Generator]
    randomness: Callable[[], Randomness]
    kept: Tensor | None = None


# The round of the client in a row of the tensors.
RoundOf = Callable[[int], ClientRound]


@dataclass(frozen=True)
class LocalRule:
    """One rule; this class is "sgd": K steps down the gradient, and nothing else.

    A subclass sets `name`, has its numbers as fields, None for one that is not there, and overrides
    what it does otherwise. All lengths are in gradient units, those of u = (w_t − w)/η_l.
    Raises ValueError for a number that is none.
    """

    name: ClassVar[str] = "sgd"
    # Whether the update that is sent may be shorter than the one that was trained, so that the
    # server's instruments have to be told.
    shortens: ClassVar[bool] = False
    # Whether a client keeps the update that it has sent, for its next round.
    keeps: ClassVar[bool] = False
    # Whether what is sent is masked, which no rule can do on its own.
    is_masked: ClassVar[bool] = False
    # What is sent in place of a model, by its name in the table of client_app.disclosure.
    tells: ClassVar[str] = ""

    def __post_init__(self) -> None:
        optional = {one.name for one in fields(self) if one.default is None}
        for one in fields(self):
            value = getattr(self, one.name)
            missing = value is None and one.name in optional
            if not missing and (not isinstance(value, int | float) or math.isnan(value)):
                raise ValueError(
                    f"the rule {self.name} has {kebab(one.name)} = {value!r}: not a number"
                )

    @cached_property
    def sent(self) -> SentRule:
        """The rule as it travels."""
        values = {kebab(one.name): getattr(self, one.name) for one in fields(self)}
        return SentRule(self.name, {key: v for key, v in values.items() if v is not None})

    @classmethod
    def read(cls, sent: SentRule) -> Self:
        """The rule of this class with the numbers of `sent`. ValueError where they are others."""
        names = {kebab(one.name): one.name for one in fields(cls)}
        if not sent.numbers.keys() <= names.keys():
            raise ValueError(f"the rule {sent} is not known")
        try:
            return cls(**{names[key]: value for key, value in sent.numbers.items()})
        except TypeError:
            raise ValueError(f"the rule {sent} is not known") from None

    def check_range(self, local_lr: float) -> None:
        """Raises ValueError where a number is too small or large to be kept to at the rate η_l."""

    def on_gradient(self, gradients: Tensor, params: Tensor, start: Tensor) -> Tensor:
        """What becomes of a step's gradients [R, d], weight decay included; they may be changed.

        `params` w [R, d] are the models before the step, `start` is w_t, [d] or [R, d]; both stay
        as they are.
        """
        del params, start
        return gradients

    def steps(self, sgd: "LocalSGD", num_clients: int, round_of: RoundOf) -> LocalSteps:
        """The steps of `num_clients` clients: by default SGD's, on what `on_gradient` gives."""
        del num_clients, round_of
        return sgd

    def on_update(
        self, start: Tensor, trained: Tensor, local_lr: float, round_of: RoundOf
    ) -> Tensor:
        """The models [B, d] that are sent of those trained, `trained` [B, d], from `start` [d]."""
        del start, local_lr, round_of
        return trained

    def to_keep(self, start: Tensor, sent: Tensor, local_lr: float) -> list[Tensor]:
        """What each of the B clients keeps for its next round of the models `sent` [B, d]: its
        update [d], gradient units; nothing where the rule does not ask for it."""
        return list((start - sent) / local_lr) if self.keeps else []

    def trained_norms(self, start: Tensor, trained: Tensor, local_lr: float) -> list[float | None]:
        """‖u_i‖ of the B clients before they shorten what they send; None where they do not."""
        if not self.shortens:
            return [None] * len(trained)
        return (row_norms(start - trained) / local_lr).tolist()

    @property
    def changes_gradients(self) -> bool:
        """Whether `on_gradient` does anything."""
        return type(self).on_gradient is not LocalRule.on_gradient

    @property
    def has_own_steps(self) -> bool:
        """Whether its steps are others than SGD's."""
        return type(self).steps is not LocalRule.steps

    @property
    def changes_updates(self) -> bool:
        """Whether `on_update` does anything."""
        return type(self).on_update is not LocalRule.on_update

    @property
    def adds_noise(self) -> bool:
        """Whether what is sent is noised, so that the client may say of itself no more than it."""
        return False

    @property
    def is_in_training(self) -> bool:
        """Whether it is carried out at every step, and not in the update alone."""
        return self.changes_gradients or self.has_own_steps


def rule_of(sent: SentRule) -> LocalRule:
    """What a rule means by the catalogue. Raises ValueError for one that it does not have."""
    if sent.name not in LOCAL_RULES:
        raise ValueError(f"the rule {sent} is not known")
    found: type[LocalRule] = load(LOCAL_RULES[sent.name])
    return found.read(sent)


def how_to_attest(sent: SentRule) -> str:
    """What to do with a ClientApp that does not attest a rule."""
    todo = "add mods=[blackthorn.client_app.mod] to its ClientApp"
    try:
        rule = rule_of(sent)
    except ValueError:
        return todo
    if rule.has_own_steps:
        return f"{todo} and train with Round.of(message).optimizer(model)"
    if rule.changes_gradients:
        return f"{todo} and train with Round.of(message).wrap(optimizer)"
    return todo


@dataclass(frozen=True)
class LocalSGD:
    """A round's local training by SGD.

    ``steps`` K; ``batch_size`` examples drawn afresh at every step (0: all of them);
    ``learning_rate`` η_l; ``weight_decay``, whose product with w is part of the gradient;
    ``rule``: what becomes of every step's gradient.

    Raises ValueError for values out of range.
    """

    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0
    rule: LocalRule = LocalRule()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"local-steps is {self.steps}: it must be at least 1")
        if self.batch_size < 0:
            raise ValueError(f"batch-size is {self.batch_size}: it must be 0 or more")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"local-lr is {self.learning_rate}: it must be positive and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight-decay is {self.weight_decay}: it must be 0 or more")

    def move(
        self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int], start: Tensor
    ) -> None:
        """w ← w − η_l rule(g + weight_decay · w); see LocalSteps."""
        del step, clients
        if self.weight_decay > 0:
            gradients.add_(params, alpha=self.weight_decay)
        changed = self.rule.on_gradient(gradients, params, start)
        params.add_(changed, alpha=-self.learning_rate)
