"""A round in a training loop of one's own: the optimizer that carries its rule out, and the reply.

    round = Round.of(message)
    optimizer = round.optimizer(model)                                      # the algorithm's own
    optimizer = round.wrap(torch.optim.AdamW(model.parameters()))           # or any other
    ...
    return round.reply(model, {"train-loss": loss}, num_examples=len(data))

All of it is made from the message alone, which names the rule, its numbers, and what of the model
is w.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from blackthorn.strategies.array_codec import decode, encode_state
from blackthorn.strategies.attestation import Attestation
from blackthorn.strategies.bounding import check_float32
from blackthorn.strategies.global_model import ModelLayout
from blackthorn.strategies.layout import Entries, as_held, state_of
from blackthorn.strategies.local_rule import ClientRound, LocalRule, how_to_attest, rule_of
from blackthorn.strategies.noise import SystemRandomness
from blackthorn.strategies.release import Release, message_release
from blackthorn.wire import (
    ARRAYS,
    ATTESTED,
    AVERAGED,
    CLIENT_ID,
    CONFIG,
    LAYOUT,
    LOCAL,
    METRICS,
    NONCE,
    NUM_EXAMPLES,
    PARAMETERS,
    RULE,
)

from .disclosure import Level, PublicRefusal, check_tells, said_in_a_round
from .messages import claims_clients, read_round
from .optimizers import RuleOptimizer, clip_before_steps, trained_by_the_rule
from .private_update import NOISE_MULTIPLIER, NOISE_SHARES, system_generator

logger = logging.getLogger("blackthorn.clients")


class Round:
    """What a train message of one of Blackthorn's strategies asks of a client."""

    # Rounds that the mod is answering, by their message's nonce.
    _open: ClassVar[dict[str, "Round"]] = {}

    def __init__(self, message: Message, rule: LocalRule | None = None) -> None:
        if RULE not in message.content:
            raise ValueError("the message names no rule: no strategy of blackthorn's has sent it")
        self._message = message
        self._request = request = read_round(message)
        check_float32("the server's local-lr", request.local_lr)
        # Given by who knows it by a run's configuration: it may be nobody else's.
        self.rule: LocalRule = rule or rule_of(request.rule)
        self.rule.check_range(request.local_lr)
        config = message.content.config_records[CONFIG]
        self._client = int(cast(int, config.get(CLIENT_ID, 0)))
        # A server that masks are to keep out would leave its claim out, too.
        claimed = self.rule.adds_noise or self.rule.is_masked or claims_clients(message)
        self.level: Level = "client" if claimed else "none"
        check_tells(self.level, self.rule.tells)
        self._state = {name: decode(array) for name, array in request.arrays.items()}
        layout = message.content.config_records.get(LAYOUT, ConfigRecord())
        # Of what is claimed to be private nothing leaves that the rule has not noised.
        averaged = () if claimed else _names(layout, AVERAGED)
        self.local = _names(layout, LOCAL)
        self._layout = ModelLayout.of(self._state, Entries(_names(layout, PARAMETERS), averaged))
        self._in_loop = False
        self._steps = 0
        # The statistics that stay here, as they were trained, and the update that the rule keeps
        # from round to round: only the mod can keep them.
        self.kept: dict[str, np.ndarray] = {}
        self.last_update: torch.Tensor | None = None
        self.next_update: list[torch.Tensor] = []
        self._sent: ArrayRecord | None = None
        self._by_mod = False

    @classmethod
    def of(cls, message: Message) -> "Round":
        """The round of a train message: under the mod always the same one.

        Raises ValueError, one line, for a message that names no rule, or one that is not known, and
        for numbers that cannot be kept to.
        """
        return cls._open.get(_nonce(message)) or cls(message)

    # For the training loop.

    @property
    def server_round(self) -> int:
        """The round's number, from 1."""
        return self._request.server_round

    @property
    def local_lr(self) -> float:
        """η_l, the rate by which the server takes updates for gradients."""
        return self._request.local_lr

    def load(self, model: nn.Module) -> None:
        """Put what the server sent into `model`, and the statistics that the client has kept for
        itself; what does not travel stays as it is there.

        Raises ValueError for a name that the model does not have, PublicRefusal as `reply` without
        the mod.
        """
        self._check_mod()
        # With the mod the message holds what was kept.
        arrays = self._message.content.array_records[ARRAYS]
        state = {name: torch.from_numpy(decode(array)) for name, array in arrays.items()}
        surplus = model.load_state_dict(state, strict=False).unexpected_keys
        if surplus:
            raise ValueError(f"the model has no {surplus[0]!r}, which the server sent")

    def optimizer(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        generator: np.random.Generator | None = None,
    ) -> RuleOptimizer:
        """The algorithm's own optimizer: each `step` does the rule's step over all trainable
        parameters as one vector, w ← w − η_l rule(g + weight_decay w) or FA-LD's.

        The loss has to be the *mean* over the batch; for FA-LD of the negative log-likelihood, to
        which the prior is added here. `generator` draws FA-LD's own noise (None: from the operating
        system's entropy). Raises ValueError where the model is not the one that the server sent.
        """
        self._enter_loop()
        parameters = trained_by_the_rule(model, self._layout.trainable, self.rule)
        steps = RuleOptimizer.steps_of(
            self.rule, self.local_lr, weight_decay, lambda _: self._told(generator)
        )
        return RuleOptimizer(parameters, self.local_lr, steps, self._count_step)

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer, which from now on carries the rule's part out before each `step`: for
        FAT-Clipping-PI the joint gradient of all its parameters is clipped.

        Raises ValueError for a rule whose steps are its own: whatever else moves the model, its law
        would not be the one that FA-LD samples from.
        """
        if self.rule.has_own_steps:
            raise ValueError(
                f"the rule {self.rule.name} is a step of its own, and another optimizer would "
                "sample from another law: use Round.of(message).optimizer(model)"
            )
        self._enter_loop()
        return clip_before_steps(optimizer, self.rule, self._count_step)

    def reply(
        self, model: nn.Module, metrics: Mapping[str, float] | None = None, num_examples: int = 1
    ) -> Message:
        """The answer to the message: `model` after the rule for updates, the attestation, and of
        the metrics what the claim lets a client say.

        Raises PublicRefusal, one line, where the rule was not carried out in the training, two
        names of what the server sent are one parameter of `model`, whose norm would count twice, or
        the ClientApp lacks the mod under a claim or with statistics of its own.
        """
        self._check_mod()
        self._check_module(model)
        self.sent(state_of(model))
        return self.answer(MetricRecord({NUM_EXAMPLES: num_examples, **(metrics or {})}))

    # For the mod.

    @property
    def cost(self) -> Release:
        """What the answer tells the server of all the client's data: without a share of the noise
        in it, everything."""
        if not self.rule.adds_noise:
            return Release(0.0)
        numbers = self.rule.sent.numbers
        return message_release(numbers[NOISE_MULTIPLIER], int(numbers[NOISE_SHARES]))

    @property
    def attestation(self) -> Attestation:
        """What a client answers that has carried out the rule."""
        return Attestation(self._request.rule, self.server_round)

    def sent(self, trained: Mapping[str, np.ndarray]) -> ArrayRecord:
        """What is sent of the model that was trained: w by the rule on what the training has moved,
        averaged statistics as they are, and everything else as the server sent it.

        Raises PublicRefusal where the training has not done its part of the rule, ValueError where
        `trained` is another model.
        """
        self._check_training()
        layout = self._layout
        for name in (*layout.trainable, *layout.averaged, *self.local):
            found = trained[name].shape if name in trained else None
            if found != self._state[name].shape:
                raise ValueError(
                    f"the trained model has {name!r} of shape {found}, the server's is "
                    f"{self._state[name].shape}"
                )
        start, moved = layout.flatten(self._state), layout.flatten(trained)
        held = layout.flatten(as_held(self._state, trained, layout.trainable))
        # The update alone: a model of less precision has rounded what it was sent, too.
        moved = torch.where(held == start, moved, start + (moved - held))
        (sent,) = models = self.rule.on_update(
            start, moved[None], self.local_lr, lambda _: self._told()
        )
        self.next_update = self.rule.to_keep(start, models, self.local_lr)
        self.kept = {name: np.asarray(trained[name]) for name in self.local}
        self._sent = encode_state(layout.unflatten(sent, self._state, layout.statistics(trained)))
        return self._sent

    @property
    def is_carried_out(self) -> bool:
        """Whether `sent` was asked for what an answer holds."""
        return self._sent is not None

    def answer(self, metrics: MetricRecord) -> Message:
        """What `sent` gave last, the attestation, and of the metrics what the claim lets a client
        say. Nothing else of an app's own is in it.

        Raises RuntimeError before `sent`.
        """
        if self._sent is None:
            raise RuntimeError("the round has no answer yet: the rule was not carried out")
        content = RecordDict({ARRAYS: self._sent.copy(), ATTESTED: self.attestation.record})
        content[METRICS] = said_in_a_round(self.level, metrics)
        return Message(content, reply_to=self._message)

    def check_ties(self, trained: Mapping[str, np.ndarray]) -> None:
        """For arrays alone, by what was trained: two names with the same numbers are taken for one
        parameter, whose norm would count twice.

        Raises ValueError without a claim. Under one it is said here alone: whether two are equal
        may hang on an example, and the bound holds for names that count twice.
        """
        if not self._counts_names:
            return
        seen: dict[bytes, str] = {}
        held = as_held(self._state, trained, self._layout.trainable)
        for name in self._layout.trainable:
            value = trained[name]
            moved = not np.array_equal(value, held[name])
            if value.size < 2 or not moved or not np.isfinite(value).all():
                continue
            key = bytes(repr(value.shape), "ascii") + np.ascontiguousarray(value).tobytes()
            other = seen.setdefault(key, name)
            if other == name:
                continue
            if self.level == "none":
                raise ValueError(_tied(name, other))
            logger.warning("round %d: %s", self.server_round, _tied(name, other))

    def _check_training(self) -> None:
        if not self.rule.is_in_training:
            return
        if not self._in_loop or self._steps == 0:
            did = "no step of its optimizer was made" if self._in_loop else "it was not asked for"
            raise PublicRefusal(
                f"the rule {self._request.rule} is carried out at every step of the training, and "
                f"{did}: {how_to_attest(self._request.rule)}"
            )
        wanted = self._wanted
        if self._steps < wanted < math.inf:
            told = f"{self._steps} steps were made, the rule's number is {wanted:g}"
            if self.rule.has_own_steps:
                raise PublicRefusal(told)
            logger.info("round %d: %s, and its bound holds", self.server_round, told)

    @property
    def _wanted(self) -> float:
        wanted = getattr(self.rule, "local_steps", None)
        return math.inf if wanted is None else float(wanted)

    @property
    def _counts_names(self) -> bool:
        """Whether a parameter with two names counts twice in what the rule does."""
        return self.rule.changes_updates or self.rule.is_in_training

    def _check_mod(self) -> None:
        """Raises PublicRefusal where only the mod does what the answer says of the round."""
        why = None
        if self.local or self.rule.keeps:
            what = "statistics = local" if self.local else f"the rule {self._request.rule}"
            why = f"{what}: nobody keeps this client's own"
        elif self.rule.is_masked:
            why = f"the rule {self._request.rule}: nobody masks the update"
        elif self.level != "none":
            why = "under a claim nobody withholds what the training raises"
        if why is not None and not self._by_mod:
            raise PublicRefusal(f"{why}; add mods=[blackthorn.client_app.mod] to its ClientApp")

    def _check_module(self, model: nn.Module) -> None:
        """By the module, which no example changes: so it is said under every claim."""
        named = dict(model.named_parameters(remove_duplicate=False)) if self._counts_names else {}
        first: dict[int, str] = {}
        for name in self._layout.trainable:
            other = first.setdefault(id(named[name]), name) if name in named else name
            if other != name:
                raise PublicRefusal(_tied(name, other))

    def _enter_loop(self) -> None:
        self._check_mod()
        if self._in_loop:
            raise ValueError("the round has its optimizer: one with all parameters is needed")
        self._in_loop = True

    def _count_step(self) -> int:
        """The step's number, from 0. Raises PublicRefusal for one too many."""
        if self.rule.is_in_training and self._steps >= self._wanted:
            raise PublicRefusal(
                f"more steps than the rule's {self._wanted:g}: its bound would not hold; make as "
                "many, or tell the strategy local_steps"
            )
        self._steps += 1
        return self._steps - 1

    def _told(self, generator: np.random.Generator | None = None) -> ClientRound:
        return ClientRound(
            self._client,
            self.server_round,
            self._request.told,
            self._request.memory,
            lambda: generator or system_generator(),
            SystemRandomness,
            self.last_update,
        )


class OpenRound:
    """While the mod answers a message, `Round.of` of it gives this round."""

    def __init__(self, message: Message, current: Round | None = None) -> None:
        self._nonce = _nonce(message)
        self._round = current or Round(message)
        self._round._by_mod = True

    def __enter__(self) -> Round:
        Round._open[self._nonce] = self._round
        return self._round

    def __exit__(self, *_: Any) -> None:
        del Round._open[self._nonce]


def _nonce(message: Message) -> str:
    return str(message.content.config_records.get(CONFIG, ConfigRecord()).get(NONCE, ""))


def _tied(name: str, other: str) -> str:
    return (
        f"{name!r} and {other!r} are one parameter, which would count twice: give the server the "
        "module, strategy.start(grid, model), or leave the second name out"
    )


def _names(record: ConfigRecord, key: str) -> tuple[str, ...]:
    names: Any = record.get(key, [])
    return tuple(map(str, names))
