"""What colluding Byzantine clients send in place of their updates, as pure functions.

All attacks have one signature, so that they can be exchanged by name:

    attack(own [b, d], *, num_clients, generator, honest=None) -> [b, d]

`own` is what the b corrupt clients of the round would honestly send, in gradient units
u_i = (w - w_i) / eta_l; `num_clients` is K, how many clients answer in the round, the corrupt
ones included; `generator` is the colluders' common randomness for the round; `honest` [h, d]
are the updates of the honest clients, for an omniscient attacker. The result has the shape and
dtype of `own`, which is left as it is; statistics are taken in float64. `own` that is not a
floating matrix with at least one row is a ValueError.
"""

# ruff: noqa: ARG001  (one signature for all: no attack needs every argument)

from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

VectorFunction = Callable[..., Tensor]


def as_updates(own: Tensor) -> Tensor:
    """`own` as a tensor [b, d]; ValueError unless it is a floating matrix with b >= 1 rows."""
    updates = torch.as_tensor(own)
    if updates.dim() != 2 or len(updates) == 0 or not updates.is_floating_point():
        raise ValueError(
            f"own updates have shape {tuple(updates.shape)} and dtype {updates.dtype}; "
            "allowed are floating matrices [b, d] with b >= 1"
        )
    return updates


def benign_updates(own: Tensor, honest: Tensor | None) -> Tensor:
    """The colluders' estimate of the benign updates, float64: `honest` if known, else `own`."""
    known = own if honest is None or len(honest) == 0 else torch.as_tensor(honest)
    return known.to(torch.float64)


def same_from_all(vector: Tensor, own: Tensor) -> Tensor:
    """One vector [d] as the answer of each row of `own`, in its dtype: [b, d]."""
    return vector.to(own.dtype).repeat(len(own), 1)


def random_gradient(
    own: Tensor, *, num_clients: int, generator: np.random.Generator, honest: Tensor | None = None
) -> Tensor:
    """Independent Gaussian directions with the norms of the honest updates.

    g_i <- ||g_i|| z_i / ||z_i||, z_i ~ N(0, I) for each client (attack A.1 of Data and Diggavi,
    "Byzantine-resilient high-dimensional federated learning"). A zero update stays zero.
    """
    own = as_updates(own)
    directions = torch.from_numpy(generator.standard_normal(tuple(own.shape)))
    lengths = torch.linalg.vector_norm(own, dim=1, keepdim=True, dtype=torch.float64)
    spans = torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    return (directions * (lengths / spans)).to(own.dtype)


def reverse_average(
    own: Tensor, *, num_clients: int, generator: np.random.Generator, honest: Tensor | None = None
) -> Tensor:
    """Minus the colluders' average, -mean_j g_j, from each of them (attack A.2)."""
    return _scaled_average(own, -1.0)


def gradient_shift(
    own: Tensor,
    *,
    num_clients: int,
    generator: np.random.Generator,
    honest: Tensor | None = None,
    scale: float = 50.0,
) -> Tensor:
    """The honest updates shifted by one Gaussian vector: g_i + scale xi (attack A.3).

    xi ~ N(0, I) is the same for all corrupt clients of the round and the first d normal
    variates of `generator`, so that clients with equal generators agree on it.
    """
    own = as_updates(own)
    shift = torch.from_numpy(generator.standard_normal(own.shape[1]))
    return (own + scale * shift).to(own.dtype)


def all_ones(
    own: Tensor, *, num_clients: int, generator: np.random.Generator, honest: Tensor | None = None
) -> Tensor:
    """The vector of ones (attack A.4)."""
    return torch.ones_like(as_updates(own))


def baruch(
    own: Tensor, *, num_clients: int, generator: np.random.Generator, honest: Tensor | None = None
) -> Tensor:
    """A little is enough: mean - z_max s, coordinate-wise, from each (attack A.5).

    The mean and the standard deviation s (divisor: the number of rows) are the colluders' own
    or, for an omniscient attacker, the honest clients' (Baruch, Baruch and Goldberg, 2019,
    algorithm 3). `baruch_z` gives z_max.
    """
    own = as_updates(own)
    seen = benign_updates(own, honest)
    spread, average = torch.std_mean(seen, dim=0, correction=0)
    return same_from_all(average - baruch_z(num_clients, len(own)) * spread, own)


def baruch_z(num_clients: int, num_corrupt: int) -> float:
    """z_max = Phi^-1((K - b - h) / (K - b)), h = floor(K / 2) + 1 - b honest supporters.

    With h honest clients further out than z_max the corrupt ones are a majority. Where the
    quotient leaves (0, 1), because the corrupt clients are a majority by themselves (h <= 0,
    where any z would do) or there is one honest client, it is held half an honest client away
    from the border, so that z_max is finite for every K and b.
    """
    num_honest = max(num_clients - num_corrupt, 1)
    supporters = num_clients // 2 + 1 - num_corrupt
    margin = 0.5 / num_honest
    quotient = min(max((num_honest - supporters) / num_honest, margin), 1.0 - margin)
    return float(norm.ppf(quotient))


def reverse_scaled_average(
    own: Tensor,
    *,
    num_clients: int,
    generator: np.random.Generator,
    honest: Tensor | None = None,
    scale: float = 50.0,
) -> Tensor:
    """Minus the colluders' average, enlarged: -scale mean_j g_j, from each (attack A.6)."""
    return _scaled_average(own, -scale)


def sign_flip(
    own: Tensor, *, num_clients: int, generator: np.random.Generator, honest: Tensor | None = None
) -> Tensor:
    """Each corrupt client's own update with the opposite sign, -g_i."""
    return -as_updates(own)


def inner_product(
    own: Tensor,
    *,
    num_clients: int,
    generator: np.random.Generator,
    honest: Tensor | None = None,
    epsilon: float = 0.1,
) -> Tensor:
    """Inner product manipulation: -epsilon mean, from each (Xie, Koyejo and Gupta, 2020).

    The mean is the colluders' or, for an omniscient attacker, the honest clients'. A small
    epsilon hides among the updates near zero and still turns the aggregate against the descent.
    """
    own = as_updates(own)
    return same_from_all(-epsilon * benign_updates(own, honest).mean(dim=0), own)


def mimic(
    own: Tensor, *, num_clients: int, generator: np.random.Generator, honest: Tensor | None = None
) -> Tensor:
    """All copy one benign update, which thereby counts too much (Karimireddy et al., 2022).

    Copied is the row with the largest projection onto the principal direction of the (centred)
    benign updates, the colluders' own or the honest clients'; the first of equals. The rows'
    projections are the entries of the principal eigenvector of their Gram matrix.
    """
    own = as_updates(own)
    seen = benign_updates(own, honest)
    centred = seen - seen.mean(dim=0)
    gram = centred @ centred.T
    if not torch.isfinite(gram).all():  # a diverged model: there is no direction to speak of
        return same_from_all(seen[0], own)
    principal = torch.linalg.eigh(gram).eigenvectors[:, -1]
    return same_from_all(seen[int(principal.abs().argmax())], own)


def _scaled_average(own: Tensor, factor: float) -> Tensor:
    own = as_updates(own)
    return same_from_all(factor * own.mean(dim=0, dtype=torch.float64), own)
