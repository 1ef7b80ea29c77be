"""How a data set's training examples are spread over the clients.

A partition is a pure function of (labels, scheme, number of clients, seed) and the scheme's own
numbers. It returns, for every client, the ascending int64 indices of its examples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from blackthorn.randomness import partition_generator

# Keeps the partition's stream apart from every other one that is derived from the same seed.


@dataclass(frozen=True)
class _Request:
    labels: np.ndarray
    num_clients: int
    generator: np.random.Generator
    shards_per_client: int
    classes_per_client: int
    dirichlet_alpha: float
    examples_per_client: int

    def pools(self) -> list[np.ndarray]:
        """The indices of each label's examples, by ascending label."""
        return [np.flatnonzero(self.labels == label) for label in np.unique(self.labels)]


def partition(
    labels: np.ndarray | Tensor,
    scheme: str,
    num_clients: int,
    seed: int,
    *,
    shards_per_client: int = 5,
    classes_per_client: int = 2,
    dirichlet_alpha: float = 0.5,
    examples_per_client: int = 0,
) -> list[np.ndarray]:
    """Spread the examples with the given int ``labels`` [n] over ``num_clients`` clients.

    * ``iid``: a random permutation in near equal parts. With ``examples_per_client`` each client
      gets that many, disjoint as long as the examples last (Zhang et al., section 2.2).
    * ``full``: every client has all the examples.
    * ``label-shards``: sorted by label, cut into shards_per_client * num_clients near equal
      shards, of which each client gets shards_per_client at random without replacement
      (Das et al., Appendix G).
    * ``classes-per-client``: each client has examples of p = classes_per_client labels, each
      label is spread evenly over the clients that have it, and the labels have equally many
      clients but for one (Yang et al., FAT-Clipping, section 5; p = all labels is their
      i.i.d. case). A label that no client has (num_clients * p < labels) is left out.
    * ``dominant-label``: each client draws three labels and 80, 10 and 10 % of its examples from
      them, distinct within a client, with replacement between clients (RAGE, section VI). By
      default min(1000, 10 n / (3 num_clients)) examples a client, the paper's own ratio, and no
      more than the smallest label has.
    * ``dirichlet``: each label is spread over the clients by proportions ~ Dirichlet(α); a client
      left with nothing gets one example of the client that has most.
    * ``two-majority``: examples_per_client (default 125) each, 46 % of them from each of two
      labels and the rest spread over all the others (Zhang et al., section 2.2); disjoint as
      long as a label's examples last.

    Raises ValueError for an unknown scheme and for what the examples cannot give.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"partition {scheme!r} is unknown: allowed are {', '.join(SCHEMES)}")
    if num_clients < 1:
        raise ValueError(f"num-clients is {num_clients}: it must be at least 1")
    if examples_per_client < 0:
        raise ValueError(f"examples-per-client is {examples_per_client}: it must be 0 or more")
    if examples_per_client > 0 and scheme not in _SIZED_SCHEMES:
        raise ValueError(
            f"examples-per-client is {examples_per_client}: partition {scheme!r} has no such "
            f"number, leave it 0 (it is for {', '.join(_SIZED_SCHEMES)})"
        )
    label_array = np.asarray(labels)
    if label_array.ndim != 1 or len(label_array) == 0:
        raise ValueError(f"labels have shape {label_array.shape}: they must be [n] with n >= 1")
    request = _Request(
        label_array,
        num_clients,
        partition_generator(seed),
        shards_per_client,
        classes_per_client,
        dirichlet_alpha,
        examples_per_client,
    )
    return [np.sort(part).astype(np.int64, copy=False) for part in SCHEMES[scheme](request)]


def _iid(request: _Request) -> list[np.ndarray]:
    everything = np.arange(len(request.labels))
    size = request.examples_per_client
    if size == 0:
        _require_enough(request, request.num_clients, "one example a client")
        return np.array_split(request.generator.permutation(everything), request.num_clients)
    _require_enough(request, size, f"examples-per-client {size}")
    return _deal(everything, [size] * request.num_clients, request.generator)


def _full(request: _Request) -> list[np.ndarray]:
    return [np.arange(len(request.labels))] * request.num_clients


def _label_shards(request: _Request) -> list[np.ndarray]:
    per_client = request.shards_per_client
    if per_client < 1:
        raise ValueError(f"shards-per-client is {per_client}: it must be at least 1")
    count = per_client * request.num_clients
    _require_enough(request, count, f"{count} label shards")
    shards = np.array_split(np.argsort(request.labels, kind="stable"), count)
    hands = request.generator.permutation(count).reshape(request.num_clients, per_client)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in hands]


def _classes_per_client(request: _Request) -> list[np.ndarray]:
    pools, per_client = request.pools(), request.classes_per_client
    if not 1 <= per_client <= len(pools):
        raise ValueError(
            f"classes-per-client is {per_client}: it must be from 1 to {len(pools)}, "
            "the number of classes"
        )
    classes = _balanced_choices(request.num_clients, per_client, len(pools), request.generator)
    parts: list[list[np.ndarray]] = [[] for _ in range(request.num_clients)]
    for label, pool in enumerate(pools):
        holders = np.flatnonzero((classes == label).any(axis=1))
        if len(holders) > len(pool):
            raise ValueError(
                f"num-clients is {request.num_clients}: {len(holders)} of them would share the "
                f"{len(pool)} examples of one label"
            )
        if len(holders) > 0:
            pieces = np.array_split(request.generator.permutation(pool), len(holders))
            for client, piece in zip(holders, pieces, strict=True):
                parts[client].append(piece)
    return [np.concatenate(pieces) for pieces in parts]


def _dominant_label(request: _Request) -> list[np.ndarray]:
    pools = request.pools()
    if len(pools) < 3:
        raise ValueError(f"partition 'dominant-label' needs 3 labels: there are {len(pools)}")
    smallest = min(len(pool) for pool in pools)
    size = request.examples_per_client or min(
        1000, 10 * len(request.labels) // (3 * request.num_clients), smallest
    )
    if size < 3:
        raise ValueError(
            f"partition 'dominant-label' gives a client {size} examples: it needs at least 3"
        )
    minor = max(1, size // 10)
    counts = (size - 2 * minor, minor, minor)
    if counts[0] > smallest:
        raise ValueError(
            f"examples-per-client is {size}: a client would need {counts[0]} distinct examples "
            f"of one label, and the smallest has {smallest}"
        )

    def draw_client() -> np.ndarray:
        chosen = request.generator.permutation(len(pools))[:3]
        draws = [
            request.generator.choice(pools[label], count, replace=False)
            for label, count in zip(chosen, counts, strict=True)
        ]
        return np.concatenate(draws)

    return [draw_client() for _ in range(request.num_clients)]


def _dirichlet(request: _Request) -> list[np.ndarray]:
    alpha = request.dirichlet_alpha
    if not 0 < alpha <= 1e6:
        raise ValueError(f"dirichlet-alpha is {alpha}: it must be above 0 and at most 1e6")
    _require_enough(request, request.num_clients, "one example a client")
    parts: list[list[np.ndarray]] = [[] for _ in range(request.num_clients)]
    for pool in request.pools():
        shares = request.generator.dirichlet(np.full(request.num_clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(pool)).astype(np.int64)
        for client, piece in enumerate(np.split(request.generator.permutation(pool), cuts)):
            parts[client].append(piece)
    return _fill_empty([np.concatenate(pieces) for pieces in parts])


def _fill_empty(parts: list[np.ndarray]) -> list[np.ndarray]:
    parts = list(parts)
    for client, part in enumerate(parts):
        if len(part) == 0:
            richest = int(np.argmax([len(other) for other in parts]))
            parts[client], parts[richest] = parts[richest][:1], parts[richest][1:]
    return parts


def _two_majority(request: _Request) -> list[np.ndarray]:
    pools, size = request.pools(), request.examples_per_client or 125
    if len(pools) < 3:
        raise ValueError(f"partition 'two-majority' needs 3 labels: there are {len(pools)}")
    if size < 3:
        raise ValueError(f"examples-per-client is {size}: 'two-majority' needs at least 3")
    counts = _two_majority_counts(request.num_clients, size, len(pools), request.generator)
    for label, pool in enumerate(pools):
        if counts[:, label].max() > len(pool):
            raise ValueError(
                f"examples-per-client is {size}: a client would need {counts[:, label].max()} "
                f"distinct examples of a label that has {len(pool)}"
            )
    hands = [
        _deal(pool, counts[:, label].tolist(), request.generator)
        for label, pool in enumerate(pools)
    ]
    return [np.concatenate(parts) for parts in zip(*hands, strict=True)]


def _two_majority_counts(
    num_clients: int, size: int, num_labels: int, generator: np.random.Generator
) -> np.ndarray:
    """How many examples of each label each client gets: int64 [num_clients, num_labels]."""
    majority, others = 46 * size // 100, num_labels - 2
    rest = size - 2 * majority
    counts = np.empty((num_clients, num_labels), dtype=np.int64)
    chosen = _balanced_choices(num_clients, 2, num_labels, generator)
    for row, labels in zip(counts, chosen, strict=True):
        row[:] = rest // others
        minor = generator.permutation(np.setdiff1d(np.arange(num_labels), labels))
        row[minor[: rest % others]] += 1
        row[labels] = majority
    return counts


def _balanced_choices(
    num_clients: int, per_client: int, num_labels: int, generator: np.random.Generator
) -> np.ndarray:
    """``per_client`` distinct labels for each client, [num_clients, per_client], at random but
    so that no label is chosen more than once oftener than another."""
    chosen = np.zeros(num_labels, dtype=np.int64)
    choices = np.empty((num_clients, per_client), dtype=np.int64)
    for row in choices:
        row[:] = np.lexsort((generator.random(num_labels), chosen))[:per_client]
        chosen[row] += 1
    return choices


def _deal(pool: np.ndarray, counts: list[int], generator: np.random.Generator) -> list[np.ndarray]:
    """Deal a hand of each size from the shuffled pool, and shuffle it again each time it cannot
    fill the next hand: hands are disjoint as long as the pool lasts, and distinct within."""
    hands, deck = [], generator.permutation(pool)
    for count in counts:
        if count > len(deck):
            deck = generator.permutation(pool)
        hands.append(deck[:count])
        deck = deck[count:]
    return hands


def _require_enough(request: _Request, needed: int, what: str) -> None:
    if needed > len(request.labels):
        raise ValueError(
            f"num-clients is {request.num_clients}: {what} needs {needed} examples, "
            f"and there are {len(request.labels)}"
        )


SCHEMES: dict[str, Callable[[_Request], list[np.ndarray]]] = {
    "iid": _iid,
    "label-shards": _label_shards,
    "classes-per-client": _classes_per_client,
    "dominant-label": _dominant_label,
    "dirichlet": _dirichlet,
    "two-majority": _two_majority,
    "full": _full,
}
_SIZED_SCHEMES = ("iid", "dominant-label", "two-majority")
