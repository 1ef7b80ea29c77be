"""The attack that runs the server's own rule before it answers, and sends what hurts most.

All b colluders send h̄ + g p, h̄ the mean of the benign updates. For each of some directions p the
length g is searched for that takes the rule's answer furthest along −h̄, against the descent: what
the rule filters out or bounds is of no use to them and is found out by trying. A rule that
withstands attacks which do not look at it may fall to this one, so that rules are judged by it.

The directions: −h̄; −sign(h̄); from h̄ to the benign update that helps least; minus the
coordinate-wise deviations; both ways along the principal axes of the benign updates, where what is
unlike among honest clients hides most. Each has the benign updates' mean distance to h̄ for unit.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .vector_attacks import as_updates, benign_updates, same_from_all

# What the server makes of a round's updates [K, d]: [d]. ValueError where it makes nothing.
ServerRule = Callable[[Tensor], Tensor]
# The same at a round, a local learning rate and a global model [d].
RuleAt = Callable[[int, float, Tensor], ServerRule]

# Lengths tried first, in units of the benign updates' spread, and halvings of the best interval.
_LENGTHS = tuple(2.0**k for k in range(-5, 7))
_REFINEMENTS = 5
# Principal axes of the benign updates that are tried, both ways.
_AXES = 2


def adaptive(
    own: Tensor,
    *,
    num_clients: int,
    generator: np.random.Generator,
    honest: Tensor | None = None,
    rule: ServerRule,
) -> Tensor:
    """h̄ + g p from each, the direction and length for which ⟨rule(U) − h̄, −h̄⟩ is largest.

    U [K, d] has the benign updates and b copies of the vector that is tried. The benign updates are
    `honest` [h, d] for an omniscient attacker; otherwise K − b are drawn with the mean and the
    covariance of the colluders' own [b, d] (of a single one, with its length for a deviation), from
    `generator`. Statistics are taken in float64, the rule sees the dtype of `own`.
    """
    own = as_updates(own)
    seen = benign_updates(own, honest)
    if honest is None or len(honest) == 0:
        seen = _drawn_like(seen, max(1, num_clients - len(own)), generator)
    average = seen.mean(dim=0)
    if not average.any() or not torch.isfinite(seen).all():
        return own.clone()
    benign = seen.to(own.dtype)

    def harm(vector: Tensor) -> float:
        updates = torch.cat([benign, same_from_all(vector, own)])
        try:
            moved = rule(updates).to(torch.float64) - average
        except ValueError:  # no step at all hurts less than a wrong one
            return -float(average @ average)
        found = float(-(moved @ average))
        return found if np.isfinite(found) else -np.inf

    tries = [_longest(harm, average, direction) for direction in _directions(seen, average)]
    _, best = max(tries, key=lambda one: one[0])
    return same_from_all(best, own)


def _longest(
    harm: Callable[[Tensor], float], average: Tensor, direction: Tensor
) -> tuple[float, Tensor]:
    """The most harm along a direction, and the vector that does it.

    Harm grows with the length until the rule looks through it: from the best of some lengths the
    search goes on, on both sides, with half the step each time.
    """

    def at(length: float) -> tuple[float, float]:
        return harm(average + length * direction), length

    found, length = max(at(length) for length in _LENGTHS)
    step = 2.0**0.5
    for _ in range(_REFINEMENTS):
        found, length = max((found, length), at(length * step), at(length / step))
        step = step**0.5
    return found, average + length * direction


def _directions(seen: Tensor, average: Tensor) -> list[Tensor]:
    centred = seen - average
    spread = float(torch.linalg.vector_norm(centred, dim=1).mean())
    unit = spread if spread > 0 else float(torch.linalg.vector_norm(average))
    worst = seen[int((seen @ average).argmin())]
    found = [-average, -average.sign(), worst - average, -centred.square().mean(dim=0).sqrt()]
    gram = centred @ centred.T
    vectors = torch.linalg.eigh(gram).eigenvectors
    for axis in range(1, min(_AXES, len(seen) - 1) + 1):
        principal = vectors[:, -axis] @ centred
        found += [principal, -principal]
    lengths = [float(torch.linalg.vector_norm(one)) for one in found]
    return [one * (unit / length) for one, length in zip(found, lengths, strict=True) if length > 0]


def _drawn_like(own: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """`count` Gaussian vectors with the mean and covariance of the rows of `own` [b, d]."""
    average = own.mean(dim=0)
    if len(own) == 1:
        spread = torch.linalg.vector_norm(own) / own.shape[1] ** 0.5
        drawn = generator.standard_normal((count, own.shape[1]))
        return average + spread * torch.from_numpy(drawn)
    mixing = generator.standard_normal((count, len(own))) / (len(own) - 1) ** 0.5
    return average + torch.from_numpy(mixing) @ (own - average)
