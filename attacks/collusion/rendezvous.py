"""Where the colluders of a round wait for each other: no network in here."""

import threading
import time
from dataclasses import dataclass, field

# Rounds kept: a straggler of the last one still learns what the others did.
_ROUNDS_KEPT = 2


@dataclass(frozen=True)
class Update:
    """One client's update as bytes: little-endian numbers of `dtype`."""

    dtype: str
    data: bytes


@dataclass
class _Gathering:
    """One round: who has posted, and from when on nobody is waited for."""

    deadline: float
    posted: dict[int, Update] = field(default_factory=dict)
    released: bool = False


class Rendezvous:
    """Lets the colluders of a round have each other's updates.

    A corrupt client knows how many clients were invited to a round, but not which. So a round is
    released when all `num_colluders` have posted, or else `patience` seconds after the first.
    Who comes later gets the updates that were released, and its own.
    """

    def __init__(self, num_colluders: int, patience: float) -> None:
        if num_colluders < 1:
            raise ValueError(f"num_colluders is {num_colluders}; allowed are 1 and above")
        if not 0 <= patience <= 3600:
            raise ValueError(f"patience is {patience:g} s; allowed are 0 to 3600")
        self._num_colluders = num_colluders
        self._patience = patience
        self._condition = threading.Condition()
        self._gatherings: dict[tuple[str, int], _Gathering] = {}

    def share(self, run: str, server_round: int, client: int, update: Update) -> dict[int, Update]:
        """Post `update`, wait for the round's release, return all updates by client, ascending.

        Waits `patience` seconds at most. ValueError if the update differs in length or dtype
        from those that are there.
        """
        with self._condition:
            gathering = self._gathering(run, server_round)
            _check_alike(update, gathering.posted)
            if not gathering.released:
                self._wait_for_release(gathering, client, update)
            known = {**gathering.posted, client: update}
        return dict(sorted(known.items()))

    def _gathering(self, run: str, server_round: int) -> _Gathering:
        key = (run, server_round)
        if key not in self._gatherings:
            self._gatherings[key] = _Gathering(time.monotonic() + self._patience)
            # Who still waits in a round that is dropped here holds on to it.
            for old in list(self._gatherings)[:-_ROUNDS_KEPT]:
                del self._gatherings[old]
        return self._gatherings[key]

    def _wait_for_release(self, gathering: _Gathering, client: int, update: Update) -> None:
        gathering.posted[client] = update
        if len(gathering.posted) < self._num_colluders:
            self._condition.wait_for(
                lambda: gathering.released, max(0.0, gathering.deadline - time.monotonic())
            )
        gathering.released = True
        self._condition.notify_all()


def _check_alike(update: Update, posted: dict[int, Update]) -> None:
    for client, other in posted.items():
        if (len(other.data), other.dtype) != (len(update.data), update.dtype):
            raise ValueError(
                f"the update has {len(update.data)} bytes of {update.dtype}; client {client}'s "
                f"has {len(other.data)} of {other.dtype}"
            )
