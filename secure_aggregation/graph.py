"""Who is whose neighbour, and how many neighbours and shares are enough (Bell et al., CCS 2020).

Clients stand in a ring in random order, and each has the k/2 next on both sides for neighbours (a
Harary graph). k is the least for which, with a fifth of all clients helping the server and the most
that may vanish vanishing, by exact hypergeometric tails over all clients

* the helpers in no client's neighbourhood learn one of its secrets, but with probability 2^-40;
* the others hang together, but with 2^-40: no k/2 in a row are all helpers or gone;
* no neighbourhood is left with too few for its shares, but with 2^-20 (the round is then refused).

Up to 128 clients everybody is everybody's neighbour, so that no probability is in it and every
client knows all whom a list of survivors can name; and so it is where no k below n − 1 will do.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

_ALL_NEIGHBOURS = 128
_HELPERS = 0.2
_SECRET, _ENOUGH = 2.0**-40, 2.0**-20
# From this on a server that lies about who vanished, which gets what 2t - k - 1 helpers know twice,
# is part of the first condition.
_LYING = 2 / 3


@dataclass(frozen=True)
class Terms:
    """On what both sides of a round agree: n `clients` are asked, `survivors` n' of them at least
    are in a sum, and more than the share `threshold` of a neighbourhood opens its secrets.

    Raises ValueError, one line, where n' are not enough to open them, and for values out of range.
    """

    clients: int
    survivors: int
    threshold: float = 2 / 3

    def __post_init__(self) -> None:
        if not 0.5 <= self.threshold < 1:
            raise ValueError(
                f"threshold = {self.threshold:g} is not allowed: at least half, below 1"
            )
        if not 3 <= self.survivors <= self.clients:
            raise ValueError(
                f"survivors = {self.survivors} of {self.clients} clients are not allowed: at least "
                "3, since two know each other's part of a sum, and at most all"
            )
        if self.survivors < self.shares_needed(self.clients):
            raise ValueError(
                f"survivors = {self.survivors} of {self.clients} clients are not allowed: fewer "
                f"than the {self.shares_needed(self.clients)} whose shares open a mask"
            )

    def shares_needed(self, neighbourhood: int) -> int:
        """t: of a neighbourhood, the client itself counted, more than the threshold's share."""
        return math.floor(self.threshold * neighbourhood + 1e-9) + 1

    @cached_property
    def degree(self) -> int:
        """k, of all n clients; n − 1: all are neighbours."""
        return _least_degree(self.clients, self.clients - self.survivors, self.threshold)

    @property
    def is_complete(self) -> bool:
        """Whether everybody is everybody's neighbour: a client then knows all whom a list of those
        in the sum can name, and neighbours that agree on one agree on the whole of it."""
        return self.degree == self.clients - 1

    @property
    def fewest_neighbours(self) -> int:
        """With fewer a client does not go on: k, or where all are neighbours n' − 1."""
        return min(self.degree, self.survivors - 1)

    def fewest_alive(self, neighbourhood: int) -> int:
        """Of a neighbourhood, the client itself counted, that has to be in the sum."""
        needed = self.shares_needed(neighbourhood)
        return max(needed, self.survivors) if self.is_complete else needed

    def agreeing_needed(self, neighbourhood: int) -> int:
        """Of a neighbourhood, the client itself counted, that has to be told one list of those in
        the sum. Where all are neighbours t is that of all n clients, however many the server says
        have told their keys: of two lists each then has t of the same n."""
        return self.shares_needed(self.clients if self.is_complete else neighbourhood)

    @property
    def helpers_needed(self) -> int:
        """2t − n: with fewer clients that help it no server has two lists of a round agreed on, t
        on each, since who does not help is told one; where everybody is everybody's neighbour."""
        return 2 * self.agreeing_needed(self.clients) - self.clients


def neighbourhoods(
    clients: "list[int]", degree: int, generator: np.random.Generator
) -> dict[int, list[int]]:
    """The neighbours of every client, ascending: a Harary graph of even `degree` over `clients` in
    random order, or all others where there are no more than `degree` of these."""
    count = len(clients)
    if degree >= count - 1:
        return {one: [other for other in clients if other != one] for one in clients}
    ring = [clients[i] for i in generator.permutation(count)]
    reach = range(1, degree // 2 + 1)
    return {
        one: sorted(ring[(place + sign * step) % count] for step in reach for sign in (1, -1))
        for place, one in enumerate(ring)
    }


@lru_cache(maxsize=64)
def _least_degree(clients: int, gone: int, threshold: float) -> int:
    if clients <= _ALL_NEIGHBOURS:
        return clients - 1
    degrees = range(2, clients - 1, 2)
    low, high = 0, len(degrees)
    # The conditions get weaker with k but for the steps of t: what is found is checked itself.
    while low < high:
        middle = (low + high) // 2
        if _is_enough(degrees[middle], clients, gone, threshold):
            high = middle
        else:
            low = middle + 1
    return degrees[low] if low < len(degrees) else clients - 1


def _is_enough(degree: int, clients: int, gone: int, threshold: float) -> bool:
    from scipy.stats import hypergeom

    helpers = math.ceil(_HELPERS * clients)
    needed = math.floor(threshold * (degree + 1) + 1e-9) + 1
    lying = 2 * needed - degree - 1 if threshold >= _LYING - 1e-9 else needed
    learnt = hypergeom.sf(min(needed, lying) - 1, clients - 1, helpers, degree)
    lost = hypergeom.sf(degree + 1 - needed, clients - 1, gone, degree)
    away = min(clients, helpers + gone)
    apart = hypergeom.sf(degree // 2 - 1, clients, away, degree // 2)
    return bool(
        clients * learnt <= _SECRET and clients * apart <= _SECRET and clients * lost <= _ENOUGH
    )
