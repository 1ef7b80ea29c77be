"""A client's policy: what its operator lets it send, whatever a server asks for.

A TOML file that the node's config names (`policy`). It is enforced before a client trains, and
together with the client's own ledger (`client_ledger.py`) over all runs of all servers.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from blackthorn.settings.catalogue import ALGORITHMS
from blackthorn.settings.config import ConfigError, RunConfig, check_known, kebab, one_line
from blackthorn.settings.declaration import OneOf
from blackthorn.settings.own_code import CLIENT_CODE_KEYS
from blackthorn.settings.rounding import exact, upward
from blackthorn.strategies.accounting import LEAST_DELTA, Charge, Release, spent
from blackthorn.strategies.release import message_release
from blackthorn.tasks.labelled import example_form, parse_input_shape
from blackthorn.tasks.own_data import load_own_data

from .disclosure import PublicRefusal, level
from .dp_sgd import dp_sgd_of
from .messages import RoundRequest
from .private_update import drawn_noise

Bound = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class PolicyRefusal(PublicRefusal):
    """What the policy or the ledger does not allow. The text is for the server: what it asked for,
    and the rule. `in_full`, with the policy's own numbers, is for the client's operator."""

    def __init__(self, told: str, in_full: str = "") -> None:
        super().__init__(told)
        self.in_full = in_full or told


@dataclass(frozen=True)
class RoundCost:
    """What one reply tells the server.

    noise_multiplier: z of the noise that the clients draw, 0 where they draw none; shares: s, in
    how many shares. local: the reply as a release of all the client's data, which may change
    at will (sensitivity 2C, multiplier z/(2√s); 0 where nothing bounds it). sample: the same for
    one example.
    """

    noise_multiplier: float
    shares: int
    local: Charge
    sample: Charge


def round_cost(config: RunConfig, request: RoundRequest) -> RoundCost:
    """What a reply costs that is made as the run's configuration and the server's request say.

    Noise counts where the run's claim has the client say nothing beside it: without one the reply
    holds its loss and its number of examples as they are, or whoever knows the seed subtracts it.
    """
    z, shares = drawn_noise(config, request)
    claim, nothing = level(config), (Release(0.0), 1)
    local = (message_release(z, shares), 1) if claim == "client" else nothing
    sample = local
    if config.local_dp_sgd and claim != "none":
        sample = dp_sgd_of(config, request.local_lr).charge()
    return RoundCost(z, shares, local, sample)


def _shape(text: str) -> str:
    parse_input_shape(text)
    return text


class Policy(BaseModel):
    """The rules of a policy file; a rule that is not there allows everything.

    All rounds of all runs add up. `delta` is that of both epsilons. With `repeated_rounds` a round
    is answered, and charged, as often as a server that was restarted asks for it. `input_shape` and
    `num_classes` are those of the client's examples, and of every run that it takes part in.
    """

    model_config = ConfigDict(
        alias_generator=kebab, extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )

    algorithms: list[Annotated[str, OneOf(tuple(ALGORITHMS))]] | None = None
    max_rounds: Count | None = None
    max_cohort: Count | None = None
    min_noise_multiplier: Bound | None = None
    max_local_epsilon: Bound | None = None
    min_dp_sgd_noise_multiplier: Bound | None = None
    max_sample_epsilon: Bound | None = None
    repeated_rounds: bool = False
    delta: Annotated[float, Field(ge=LEAST_DELTA, lt=1)] = 1e-5
    input_shape: Annotated[str, AfterValidator(_shape)] | None = None
    num_classes: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if not self.model_fields_set - {"delta", "repeated_rounds", "input_shape", "num_classes"}:
            raise ValueError("it has no rule and would allow everything")
        if (self.input_shape is None) != (self.num_classes is None):
            raise ValueError("input-shape and num-classes go together: set both, or neither")
        return self

    @property
    def examples(self) -> tuple[tuple[int, ...], int] | None:
        """The shape of the client's examples and the number of their classes, where it says so."""
        if self.input_shape is None or self.num_classes is None:
            return None
        return parse_input_shape(self.input_shape), self.num_classes

    def check_run(self, config: RunConfig) -> None:
        """Raises PolicyRefusal for a run in which no round could be allowed."""
        for key in CLIENT_CODE_KEYS:
            if ":" in (name := getattr(config, key)):
                raise PolicyRefusal(f"{key} = {name}: the client runs no code of the server's")
        if self.algorithms is not None and config.algorithm not in self.algorithms:
            raise PolicyRefusal(
                f"algorithm = {config.algorithm} is not among the client's algorithms",
                f"algorithm = {config.algorithm} is not allowed: {', '.join(self.algorithms)}",
            )
        self._check_examples(config)
        self._check_claim(config)

    def _check_examples(self, config: RunConfig) -> None:
        """The run is for examples of the policy's kind, whatever the client has: that some label
        does not fit a smaller num-classes would tell of it."""
        if self.examples is None:
            return
        try:
            asked = example_form(config)
        except ValueError as error:
            raise PolicyRefusal(str(error)) from None
        if asked != self.examples:
            raise PolicyRefusal(
                f"the examples of task {config.task} have not the client's input-shape and "
                "num-classes",
                f"task = {config.task} with {_kind_of(asked)} is not allowed: "
                f"{_kind_of(self.examples)}",
            )

    def _check_claim(self, config: RunConfig) -> None:
        """What a client says beside its model must be no more than a bound on epsilon covers."""
        claim = level(config)
        if self.max_local_epsilon is not None and claim != "client":
            raise PolicyRefusal(
                "the client's max-local-epsilon asks for a claim of client-level privacy: without, "
                "clients report what no noise covers"
            )
        if self.max_sample_epsilon is not None and claim == "none":
            raise PolicyRefusal(
                "the client's max-sample-epsilon asks for a claim of privacy: without, clients "
                "report what no noise covers"
            )

    def check_round(
        self, config: RunConfig, server_round: int, last_round: int, cost: RoundCost
    ) -> None:
        """Raises PolicyRefusal for a round that the run has not, or that does not come after the
        `last_round` that was answered of it, and where its noise is less than the policy wants."""
        if not 1 <= server_round <= config.num_server_rounds:
            raise PolicyRefusal(
                f"round {server_round} is not among the {config.num_server_rounds} of the run's "
                "configuration"
            )
        if server_round <= last_round and not self.repeated_rounds:
            raise PolicyRefusal(
                f"round {server_round} comes after round {last_round} of the same run: the client "
                "answers every round once, in their order"
            )
        self._check_noise(config, cost)

    def _check_noise(self, config: RunConfig, cost: RoundCost) -> None:
        z, least = cost.noise_multiplier, self.min_noise_multiplier
        if least is not None and (z < least or config.insecure_seeded_noise):
            raise PolicyRefusal(
                f"noise-multiplier = {_drawn(z, config)} is below the client's "
                "min-noise-multiplier",
                f"noise-multiplier = {_drawn(z, config)} is not allowed: at least {least:g}",
            )
        most = self.max_cohort
        if most is not None and z > 0 and cost.shares > most:
            raise PolicyRefusal(
                f"{cost.shares} clients share the noise, more than the client's max-cohort",
                f"a cohort of {cost.shares} clients is not allowed: at most {most}",
            )
        z = config.dp_sgd_noise_multiplier if config.local_dp_sgd else 0.0
        least = self.min_dp_sgd_noise_multiplier
        if least is not None and (z < least or config.insecure_seeded_noise):
            raise PolicyRefusal(
                f"dp-sgd-noise-multiplier = {_drawn(z, config)} is below the client's "
                "min-dp-sgd-noise-multiplier",
                f"dp-sgd-noise-multiplier = {_drawn(z, config)} is not allowed: at least {least:g}",
            )

    def check_sent(self, rounds: int, local: Sequence[Charge], sample: Sequence[Charge]) -> None:
        """Raises PolicyRefusal where `rounds` replies that cost so much together are too many."""
        if self.max_rounds is not None and rounds > self.max_rounds:
            raise PolicyRefusal(
                "the client has sent as many rounds as its max-rounds allows",
                f"round {rounds} of all runs is not allowed: at most {self.max_rounds}",
            )
        for name, limit, charges in (
            ("max-local-epsilon", self.max_local_epsilon, local),
            ("max-sample-epsilon", self.max_sample_epsilon, sample),
        ):
            epsilon = 0.0 if limit is None else spent(charges, self.delta, "rdp").epsilon
            if limit is not None and epsilon > limit:
                raise PolicyRefusal(
                    f"the round would pass the client's {name}",
                    f"the round would make epsilon {upward(epsilon, 4)} in all at delta "
                    f"{exact(self.delta)}: {name} is {exact(limit)}",
                )


def _drawn(z: float, config: RunConfig) -> str:
    return f"{z:g}, of noise that a seed gives away," if config.insecure_seeded_noise else f"{z:g}"


def _kind_of(examples: tuple[tuple[int, ...], int] | None) -> str:
    if examples is None:
        return "no labelled examples"
    shape, num_classes = examples
    return f"input-shape = {','.join(map(str, shape))} and num-classes = {num_classes}"


def read_policy(path: Path, data: str = "") -> Policy:
    """The policy in the file `path`, for a client whose own examples are at `data`, if it has any.

    Raises ConfigError, one line, also where it does not say what those examples are: what a run
    asks for is not held against them.
    """
    policy = _read_policy(path)
    if data and policy.examples is None:
        raise ConfigError(
            f"policy {path} must say what the examples of {data} are: set input-shape, such as "
            '"64" or "1,28,28", and num-classes'
        )
    return policy


def check_own_data(policy: Policy, data: str) -> None:
    """Look at all the client's own examples before any server does.

    Raises ConfigError, which names the row or image that is not what the policy says.
    """
    if policy.examples is None:
        return
    try:
        load_own_data(data, *policy.examples)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _read_policy(path: Path) -> Policy:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        keys = [kebab(name) for name in Policy.model_fields]
        check_known(values, keys, f"a policy's are {', '.join(keys)}")
        return Policy.model_validate(values)
    except OSError as error:
        raise ConfigError(f"policy {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"policy {path}: {one_line(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy {path} is not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"policy {path}: {error}") from None
