"""Langevin steps with conducive gradients, FSGLD (El Mekkaoui et al., arXiv 2004.11231).

Client s sends a Gaussian q_s that is fitted to its likelihood p_s once, the server holds q = Π q_s.
Where s is drawn, with probability f_s, it moves along

    ∇ log p_0 + (1/f_s) ∇ log p_s + ∇ log q − (1/f_s) ∇ log q_s

whose mean over s is the gradient of the log posterior, whatever the q_s are; where the likelihoods
are Gaussian and the q_s exact, it is that gradient for every s, so that neither who is drawn nor
how many steps it makes moves the law. Here f_s = p_s, its share of the examples, and the noises of
a round add up to 2ητ whoever is drawn (`FedLangevin.share_of_noise`).

A fit at θ̂, the model of its rounds: −log q_s(θ) = g_sᵀ(θ − θ̂) + ½(θ − θ̂)ᵀH_s(θ − θ̂), with the
gradient g_s and the curvature H_s, or a part of it, of −log p_s there. Without curvature, and
fitted anew from time to time, these are SVRG's control variates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from blackthorn.settings.config import RunConfig
from blackthorn.settings.declaration import KeyGroup
from blackthorn.wire import DIRECTION, LIKELIHOOD, SHARE, SHARED_SEED, TOTAL_EXAMPLES

from .aggregation import Aggregate
from .attestation import SentRule
from .enrolment import Client
from .fed_langevin import FedLangevin, Langevin, LangevinSteps, LocalLangevin
from .learning_rate import LangevinRate
from .local_rule import LocalRule, LocalSGD, LocalSteps, RoundOf
from .participation import CohortPlan
from .rounds import ModelKept, RoundContext
from .shared_noise import shared_noise

Surrogate = Literal["none", "linear", "diagonal", "full"]
# Of one model's numbers, for each of which "full" takes a round and every client d more numbers.
MOST_FULL = 64
_FITS, _CENTRE = "fit-", "fit-centre"


class ConduciveOptions(KeyGroup):
    """Of what kind the q_s are, and when they are fitted."""

    surrogate: Surrogate = "diagonal"
    refit_every: int = Field(0, ge=0)
    probes: Literal[1, 2, 4, 8, 16, 32, 64] = 8


@dataclass(frozen=True, eq=False)
class LocalFit:
    """The step, or steps, by which B clients evaluate a part of their Gaussians at w_t.

    `counts` n_s [B]; `local_lr` η_l, by which the server takes the part out of the model that is
    sent, w_t − η_l part. `directions` v: [P, d] of each client, or of [1, d]; none: the part is the
    gradient g_s, else H_s v, or where `diagonal` is set the mean of v ∘ H_s v over P v of ±1.
    """

    counts: Tensor
    local_lr: float
    steps: int
    diagonal: bool
    directions: Any
    state: dict[int, list[Tensor]]
    # The whole likelihood, not a batch's.
    batch_size: int = 0

    def move(
        self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int], start: Tensor
    ) -> None:
        """Put the models `params` [R, d] where the next gradient is wanted, at last the answer.

        H v is (g(w_t + h v) − g(w_t))/h, exact on quadratics but for rounding.
        """
        start = start.expand_as(params)
        scale = self.counts[list(clients)].to(params)[:, None]
        gradients = scale * gradients
        if self.steps == 1:
            params.copy_(start - self.local_lr * gradients)
            return
        h = torch.finfo(params.dtype).eps ** (1 / 3) * start.abs().amax(1, True).clamp(min=1.0)
        for row, client in enumerate(clients):
            kept = self.state.setdefault(client, [])
            if step == 0:
                kept[:] = [gradients[row], torch.zeros_like(gradients[row])]
            else:
                product = (gradients[row] - kept[0]) / h[row]
                before = self.directions(client, step - 1, params)
                kept[1] += before * product / (self.steps - 1) if self.diagonal else product
            if step < self.steps - 1:
                params[row] = start[row] + h[row] * self.directions(client, step, params)
            else:
                # A Gaussian's precision is not negative; a network's curvature can be.
                part = kept[1].clamp(min=0) if self.diagonal else kept[1]
                params[row] = start[row] - self.local_lr * part


@dataclass(frozen=True)
class FitGradient(LocalRule):
    """A client sends ∇(−log p_s)(w_t) in place of a model."""

    name: ClassVar[str] = "fit-gradient"
    tells: ClassVar[str] = LIKELIHOOD

    local_steps: int = 1

    def steps(self, sgd: LocalSGD, num_clients: int, round_of: RoundOf) -> LocalSteps:
        """One step, with all examples."""
        return self._fit(sgd, num_clients, round_of)

    def _fit(
        self, sgd: LocalSGD, num_clients: int, round_of: RoundOf, diagonal: bool = False
    ) -> LocalFit:
        rounds = [round_of(row) for row in range(num_clients)]
        told = [one.told for one in rounds]
        counts = [one.get(SHARE, 0.0) * one.get(TOTAL_EXAMPLES, 0) for one in told]
        if min(counts) <= 0:
            raise ValueError(f"client {rounds[0].client} was told no number of its examples")

        def direction(client: int, number: int, like: Tensor) -> Tensor:
            dimension = like.shape[1]
            if diagonal:
                seed = int(told[client].get(SHARED_SEED, 0))
                server_round = rounds[client].server_round
                signs = shared_noise(seed, server_round, 0, dimension, torch.float64).sign()
                return (signs * hadamard(number, self.local_steps - 1, dimension)).to(like)
            along = torch.zeros(dimension, dtype=like.dtype, device=like.device)
            along[int(told[client].get(DIRECTION, 0))] = 1.0
            return along

        numbers = torch.tensor(counts, dtype=torch.float64)
        return LocalFit(numbers, sgd.learning_rate, self.local_steps, diagonal, direction, {})


@dataclass(frozen=True)
class FitCurvature(FitGradient):
    """A client sends a column of its curvature at w_t, or its diagonal by P = `local_steps` − 1
    directions: rows of Hadamard's matrix with random signs, which all share (Bekas et al., 2007).
    What is off the diagonal cancels but for pairs of coordinates a multiple of P apart."""

    name: ClassVar[str] = "fit-curvature"

    local_steps: int = 2
    diagonal: int = 0

    def steps(self, sgd: LocalSGD, num_clients: int, round_of: RoundOf) -> LocalSteps:
        """A step for each direction, after that at w_t, with all examples."""
        return self._fit(sgd, num_clients, round_of, bool(self.diagonal))


@dataclass(frozen=True, eq=False)
class LocalConducive(LocalLangevin):
    """FA-LD's steps along ∇̃f^c + e + Bθ, e [d] and B ([d], [d, d] or 0) the client's of
    `memories` [B, d + numbers of B]."""

    memories: Tensor

    def move(
        self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int], start: Tensor
    ) -> None:
        """One step in place, as `LocalLangevin.move`. Raises ValueError for a memory of another
        size."""
        d = params.shape[1]
        memory = self.memories[list(clients)].to(params)
        pull, curvature = memory[:, :d], memory[:, d:]
        if curvature.shape[1] == d:
            pull = pull + curvature * params
        elif curvature.shape[1] == d * d:
            pull = pull + torch.einsum("rij,rj->ri", curvature.reshape(-1, d, d), params)
        elif curvature.shape[1]:
            told = f"a surrogate of {memory.shape[1]} numbers for {d}"
            raise ValueError(f"the server sent {told}: allowed are d, 2 d and d + d²")
        gradients.add_(pull, alpha=1 / self.total_examples)
        super().move(params, gradients, step, clients, start)


@dataclass(frozen=True)
class ConduciveSteps(LangevinSteps):
    """A client's K steps are FA-LD's along conducive gradients; the server sends it, as its memory,
    what ∇ log q − (1/f_s) ∇ log q_s is."""

    name: ClassVar[str] = "conducive"

    def steps(self, sgd: LocalSGD, num_clients: int, round_of: RoundOf) -> LocalSteps:
        """Raises ValueError where a client was not told its share of the examples, or q."""
        memories = [round_of(row).memory for row in range(num_clients)]
        if any(memory is None for memory in memories):
            raise ValueError("the server sent no surrogate of the likelihoods")
        base = super().steps(sgd, num_clients, round_of)
        known = torch.stack([memory for memory in memories if memory is not None])
        return LocalConducive(**vars(base), memories=known)


class ConduciveLangevin(FedLangevin):
    """FA-LD along conducive gradients: the first rounds fit a Gaussian to every client's
    likelihood, and leave θ as it is; in all others who is drawn moves along
    ∇ log q − (1/f_s) ∇ log q_s, too.

    `surrogate`: the curvature of q_s, none in "linear" (one round), a "diagonal" (two rounds, by
    `probes` directions), "full" (d + 1 rounds, d at most 64; exact for Gaussian
    likelihoods); "none": there is no q, and all that is left of FSGLD is its noise (DSGLD).
    `refit_every`: rounds from one fit to the next (0: one fit).
    A client that did not answer in all rounds of a fit has no q_s, and none in q: the mean stays
    what it is. What a client sends in a fit are exact statistics of its examples. The server keeps
    them, m d numbers for each part. The other options are those of FedLangevin.
    Raises ValueError for other options; `start` where the rounds are too few for a fit.
    """

    Options = ConduciveOptions
    share_of_noise = "round"

    def __init__(
        self,
        step_size: float | LangevinRate,
        *,
        surrogate: Surrogate = "diagonal",
        refit_every: int = 0,
        probes: Literal[1, 2, 4, 8, 16, 32, 64] = 8,
        **options: Any,
    ) -> None:
        super().__init__(step_size, **options)
        self._own = ConduciveOptions(surrogate=surrogate, refit_every=refit_every, probes=probes)
        # By client its parts, float64 [d] each, of the fit that is under way, or was last.
        self._parts: dict[int, list[Tensor]] = {}
        self._centre = torch.empty(0)
        # Σ over the clients of a whole fit, [parts, d]; None: not summed yet.
        self._joint: Tensor | None = None

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The steps that the run asks for, or in a round of a fit, which the server says, its."""
        own = ConduciveOptions(**cls.option_values(config))
        if asked.name == FitGradient.name and own.surrogate != "none":
            return FitGradient()
        if asked.name == FitCurvature.name and own.surrogate in ("diagonal", "full"):
            return _fit_of_curvature(own)
        return _steps(own, Langevin.of(config), LangevinRate.of(config), local_lr)

    def rounds_allowed(self, num_rounds: int, done: int, model: Tensor) -> int:
        """Raises ValueError where a fit takes all rounds, or the model is too large for it."""
        fit = self._rounds_of_fit(len(model))
        if self._own.surrogate == "full" and len(model) > MOST_FULL:
            raise ValueError(
                f"surrogate = full is not allowed for a model of {len(model)} numbers: at most "
                f"{MOST_FULL}, or surrogate = diagonal"
            )
        if min(num_rounds, self._own.refit_every or num_rounds) <= fit:
            raise ValueError(
                f"a fit of the clients' likelihoods takes {fit} rounds: more rounds are needed, in "
                f"all ({num_rounds}) and from one to the next (refit-every = "
                f"{self._own.refit_every}; 0: one fit)"
            )
        return super().rounds_allowed(num_rounds, done, model)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """FA-LD's steps along conducive gradients, or what is asked for in a fit."""
        part = self._part(context)
        if part is None:
            return _steps(self._own, self._langevin, self._step_sizes, context.local_lr)
        return FitGradient() if part == 0 else _fit_of_curvature(self._own)

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        """The scheme's, each with what it needs of q; in a fit everybody."""
        part = self._part(context)
        if part is None:
            plan = super().draw_cohort(clients, context)
            if self._own.surrogate == "none":
                return plan
            return replace(plan, memories=self._memories(plan.clients, context))
        plan = self._plan({client: self._shares[client] for client in sorted(self._shares)})
        if part == 0:
            return plan
        told = {client: {**own, DIRECTION: part - 1} for client, own in plan.told.items()}
        return replace(plan, told=told)

    def replies_needed(self, context: RoundContext) -> int:
        """Of a fit's rounds no more than of any other algorithm's."""
        return self.quorum if self._part(context) is not None else super().replies_needed(context)

    def combine(self, updates: Tensor, weights: Tensor, context: RoundContext) -> Aggregate:
        """The mean of the clients' models. Raises ModelKept in a fit, whose parts are kept."""
        part = self._part(context)
        if part is None:
            return super().combine(updates, weights, context)
        if part == 0:
            self._parts, self._centre = {}, context.model.double()
        self._joint = None
        rows = updates.double()
        for client, row in zip(context.accepted, rows, strict=True):
            known = self._parts.setdefault(client, []) if part == 0 else self._parts.get(client, [])
            if len(known) == part:
                known.append(row.clone())
        fit = self._rounds_of_fit(len(context.model))
        raise ModelKept(f"the clients' likelihoods are fitted: round {part + 1} of {fit}")

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """The population; a run begins without a fit."""
        super().on_enrolment(clients)
        self._parts, self._centre, self._joint = {}, torch.empty(0), None

    def own_values(self) -> dict[str, Any]:
        """FA-LD's, and the q_s by client, with θ̂."""
        fits = {_FITS + str(c): torch.cat(parts).numpy() for c, parts in self._parts.items()}
        return {**super().own_values(), **fits, _CENTRE: self._centre.numpy()}

    def restore_own(self, values: Mapping[str, Any]) -> None:
        """The same posterior, noise and q."""
        super().restore_own(values)
        arrays = {n: torch.tensor(v) for n, v in values.items() if isinstance(v, np.ndarray)}
        self._centre, self._joint = arrays.pop(_CENTRE), None
        size = max(1, len(self._centre))
        self._parts = {
            int(name.removeprefix(_FITS)): list(array.split(size))
            for name, array in arrays.items()
            if name.startswith(_FITS)
        }

    def _rounds_of_fit(self, dimension: int) -> int:
        return {"none": 0, "linear": 1, "diagonal": 2, "full": 1 + dimension}[self._own.surrogate]

    def _part(self, context: RoundContext) -> int | None:
        """Which part of a fit the round is for, from 0; None: it is one of the chain's."""
        past = context.server_round - 1
        if self._own.refit_every:
            past %= self._own.refit_every
        return past if past < self._rounds_of_fit(len(context.model)) else None

    def _memories(self, clients: Sequence[int], context: RoundContext) -> dict[int, Tensor]:
        """By client e and B of ∇(−log q) − (1/f_s) ∇(−log q_s) = e + Bθ, one after the other."""
        d, fit = len(context.model), self._rounds_of_fit(len(context.model))
        none = torch.zeros(fit, d, dtype=torch.float64)

        def fitted(client: int) -> Tensor:
            parts = self._parts.get(client, [])
            return torch.stack(parts) if len(parts) == fit else none

        if self._joint is None:
            # In one order, also where they come from a file: sums round by it.
            self._joint = sum(map(fitted, sorted(self._parts)), none)
        q, has_fit = self._joint, len(self._centre) > 0

        def memory(client: int) -> Tensor:
            rest = q - fitted(client) / self._shares[client]
            # What was sent are columns.
            pull, curvature = rest[0], rest[1:].T if self._own.surrogate == "full" else rest[1:]
            if has_fit and self._own.surrogate == "diagonal":
                pull = pull - curvature[0] * self._centre
            elif has_fit and self._own.surrogate == "full":
                pull = pull - curvature @ self._centre
            return torch.cat([pull, curvature.reshape(-1)]).to(context.model.dtype)

        return {client: memory(client) for client in clients}


def hadamard(row: int, size: int, dimension: int) -> Tensor:
    """A row of Hadamard's matrix of a `size` that is a power of 2, repeated: ±1 [dimension]."""
    column = torch.arange(dimension) % size
    shared = sum((row & column) >> bit & 1 for bit in range(size.bit_length()))
    return 1.0 - 2.0 * (torch.as_tensor(shared) % 2).double()


def _steps(
    own: ConduciveOptions, langevin: Langevin, rate: LangevinRate, local_lr: float
) -> LangevinSteps:
    kind = LangevinSteps if own.surrogate == "none" else ConduciveSteps
    return kind.of(langevin, rate, local_lr)


def _fit_of_curvature(own: ConduciveOptions) -> FitCurvature:
    return FitCurvature(1 + own.probes, 1) if own.surrogate == "diagonal" else FitCurvature(2, 0)
