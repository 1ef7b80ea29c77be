"""Clients that take turns: nobody joins too soon, and no round has two releases."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .ledger import Ledger
from .noise_record import NoiseRecord, Recorded
from .participation import RotatingParticipation
from .privacy_plan import PrivacyPlan
from .release import Release
from .rounds import RoundContext, RunOver
from .run_state import RunState

# Names of the state's values.
_DEAL, _JOINED, _POPULATION = "deal", "joined", "population"


def check_turns(state: RunState, plan: PrivacyPlan) -> None:
    """Raises ValueError, one line, where clients took turns in the run that left `state` and take
    none by `plan`, or the other way round: who joined when would be forgotten, and of rounds that
    others lie between a client may be in more than it is charged for."""
    took, takes = _JOINED in state.own, plan.groups > 1
    # What is there before the first round says nothing of turns.
    if took != takes and (took or state.server_round):
        which = "take turns" if takes else "take no turns"
        raise ValueError(
            f"a plan by which clients {which} is not allowed: they did "
            f"{'not ' if takes else ''}in the run whose state it is"
        )


@dataclass
class Turns:
    """What a run keeps of the turns of its clients: who joined when, and the noises.

    `folder`: where noise and release of a round lie before anybody sees it; None: nowhere, and a
    run that died in between is not gone on with. `identity`: what the ids are that are dealt.
    """

    plan: PrivacyPlan
    folder: Path | None = field(default=None, compare=False)
    identity: str = "node"
    _record: NoiseRecord = field(init=False)
    _joined: dict[int, int] = field(default_factory=dict, init=False)
    _population: set[int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._record = NoiseRecord(self.plan.bands, self.folder)

    def begin(self, run: str, anew: bool) -> None:
        """Before anybody is asked: the ledger's name of the run, which is new or goes on from a
        state. Raises ValueError, one line, where what is on record is another run's."""
        if anew and self._joined:
            raise ValueError(
                "a second start without from_state is not allowed where clients take turns: build "
                "a new strategy, or give it from_state"
            )
        self._record.begin(run)

    def population(self, there: set[int]) -> set[int]:
        """The nodes of the run, of `there` when it begins: one with a new id, which whoever was in
        any other group may have, is not of them when it goes on either."""
        if self._population is None:
            self._population = there
        return self._population

    def is_on_record(self, server_round: int) -> bool:
        """Whether the round's release is there, whatever anybody would send."""
        return self._record.holds(server_round)

    def noise(self, server_round: int, fresh: Tensor) -> Tensor:
        """The round's noise [d] of deviation 1, from independent normal numbers `fresh` [d]."""
        return torch.from_numpy(self._record.noise(server_round, fresh.numpy()))

    def release(
        self,
        context: RoundContext,
        ledger: Ledger | None,
        release: Release,
        make: Callable[[], Tensor],
        charge: Callable[[Release], None],
    ) -> Tensor:
        """What the round releases [d]: what `make` gives, on record as `release` and then charged;
        of a round that is done again what is on record, charged once, as what it was.

        `ledger` holds what was charged of the run; None: nothing is claimed. Raises
        RunOver, and nothing is released, where a client would join again within b rounds, rounds
        were charged of which there is no record, or the record does not say what it costs.
        """
        server_round = context.server_round
        self._join(server_round, context.cohort.clients)
        if ledger is None:
            return make()
        charged, self._record.run = ledger.rounds_of_run, ledger.run
        try:
            recorded = self._record.released(server_round)
        except ValueError as error:
            raise RunOver(f"the round is withheld: {error}") from None
        if recorded is None and charged != server_round - 1:
            raise RunOver(
                f"the round is withheld: {charged} rounds of the run have been charged, and what "
                "was released in them is not on record"
            )
        if recorded is None:
            recorded = Recorded(make().numpy(), release)
            self._record.keep(server_round, recorded)
        if charged < server_round:
            if recorded.release is None:
                raise RunOver(
                    "the round is withheld: an earlier version put it on record, not charged yet, "
                    "and did not note with how much noise"
                )
            charge(recorded.release)
        # A copy: whoever is given it may write into it.
        return torch.from_numpy(recorded.vector.copy())

    def values(self, server_round: int) -> dict[str, Any]:
        """For the state after a round."""
        joined = {str(client): last for client, last in self._joined.items()}
        population = None if self._population is None else sorted(self._population)
        own = {_DEAL: self._deal(), _JOINED: joined, _POPULATION: population}
        return {**own, **self._record.values(server_round)}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from `values`. Raises ValueError, one line, where turns or noise of their run were
        others: two rounds of a client might then be closer than b, or their rows not apart."""
        if _JOINED not in values:
            return
        held = values.get(_DEAL, {})
        for name, own in self._deal().items():
            if held.get(name) != own:
                raise ValueError(
                    f"{name} = {own} is not allowed: the run whose state it is had "
                    f"{held.get(name)}, by which its clients take turns"
                )
        self._joined |= {int(client): last for client, last in values[_JOINED].items()}
        if values[_POPULATION] is not None:
            self._population = set(values[_POPULATION])
        self._record.restore(values)

    def _deal(self) -> dict[str, int | str]:
        kind = self.plan.participation
        assert isinstance(kind, RotatingParticipation)
        return {
            "groups": kind.groups,
            "bands": self.plan.bands,
            "seed": int(kind.seed),
            "num_clients": self.plan.num_clients,
            "identity": "node" if self.identity == "node" else "query or key",
        }

    def _join(self, server_round: int, clients: Sequence[int]) -> None:
        for client in clients:
            last = self._joined.get(client, server_round)
            if last != server_round and abs(server_round - last) < self.plan.groups:
                raise RunOver(
                    "the round is withheld: a client would join again within "
                    f"{self.plan.groups} rounds"
                )
        self._joined |= dict.fromkeys(clients, server_round)
