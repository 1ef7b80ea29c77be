"""The attack that runs the server's own rule before it answers, and sends what hurts most.

Colluder i sends h̄ + g p + e_i, h̄ the mean of the benign updates. For each of some directions p
and disguises e the length g is searched for that takes the rule's answer furthest along −h̄, against
the descent: what the rule filters out or bounds is of no use to them and is found out by trying. A
rule that withstands attacks which do not look at it may fall to this one: rules are judged by it.

The directions: −h̄; −sign(h̄); from h̄ to the benign update that helps least; minus the
coordinate-wise deviations; both ways along the principal axes of the benign updates, where what is
unlike among honest clients hides most. Each has the benign updates' mean distance to h̄ for unit.

The disguises: none, the same from all; how far each colluder's own update is from h̄; and noise,
half the unit and a whole one long: copies stand out among unlike updates, and these are unlike.

All that is tried lies in the span of the benign updates, directions and disguises. To a rule that
asks for inner products alone the coordinates in an orthonormal basis of it are as good as the
updates, and far fewer than these have.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .vector_attacks import as_updates, benign_updates


@dataclass(frozen=True)
class ServerRule:
    """What the server makes of a round's updates [K, d]: [d]. ValueError where it makes nothing.

    by_products: the answer is a sum of the updates whose coefficients follow from their inner
    products alone, so that turning them all turns it.
    """

    answer: Callable[[Tensor], Tensor]
    by_products: bool = False

    def __call__(self, updates: Tensor) -> Tensor:
        """The answer."""
        return self.answer(updates)


# The same at a round, a local learning rate and a global model [d].
RuleAt = Callable[[int, float, Tensor], ServerRule]

# Lengths tried first, in units of the benign updates' spread, with and without a disguise, and
# halvings of the best one's interval.
_LENGTHS = tuple(2.0**k for k in range(-5, 7))
_DISGUISED = tuple(2.0**k for k in range(-1, 5))
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
    """h̄ + g p + e_i, the direction, length and disguise for which ⟨rule(U) − h̄, −h̄⟩ is largest.

    U [K, d] has the benign updates and the b vectors that are tried. The benign updates are
    `honest` [h, d] for an omniscient attacker; otherwise K − b are drawn with the mean and the
    covariance of the colluders' own [b, d] (of a single one, with its length for a deviation), from
    `generator`, as is the noise of a disguise. Statistics are taken in float64, the rule sees the
    dtype of `own`.
    """
    own = as_updates(own)
    seen = benign_updates(own, honest)
    if honest is None or len(honest) == 0:
        seen = _drawn_like(seen, max(1, num_clients - len(own)), generator)
    average = seen.mean(dim=0)
    if not average.any() or not torch.isfinite(seen).all():
        return own.clone()
    spread = _spread(seen)
    disguises = _disguises(own, average, spread, generator)
    directions = _directions(seen, average, spread)
    basis = _basis([seen, *disguises, directions]) if rule.by_products else None
    if basis is None:
        return _worst(seen, disguises, directions, rule, own.dtype).to(own.dtype)
    disguises = [disguise @ basis for disguise in disguises]
    found = _worst(seen @ basis, disguises, directions @ basis, rule, own.dtype)
    return (found @ basis.T).to(own.dtype)


def _worst(
    seen: Tensor, disguises: list[Tensor], directions: Tensor, rule: ServerRule, dtype: torch.dtype
) -> Tensor:
    """What does most harm of all that is tried [b, d], float64."""
    average, benign = seen.mean(dim=0), seen.to(dtype)

    def harm(vectors: Tensor) -> float:
        try:
            moved = rule(torch.cat([benign, vectors.to(dtype)])).to(torch.float64) - average
        except ValueError:  # no step at all hurts less than a wrong one
            return -float(average @ average)
        found = float(-(moved @ average))
        return found if np.isfinite(found) else -np.inf

    most, best = -np.inf, average.expand(disguises[0].shape)
    for disguise in disguises:
        start = average + disguise
        lengths = _DISGUISED if disguise.any() else _LENGTHS
        for direction in directions:
            found, length = max((harm(start + g * direction), g) for g in lengths)
            if found <= most and disguise.any():
                continue
            # Harm grows with the length until the rule looks through it: from the best of some
            # lengths the search goes on, on both sides, with half the step each time.
            step = 2.0**0.5
            for _ in range(_REFINEMENTS):
                sides = [(harm(start + g * direction), g) for g in (length * step, length / step)]
                found, length = max((found, length), *sides)
                step = step**0.5
            if found > most:
                most, best = found, start + length * direction
    return best


def _basis(parts: list[Tensor]) -> Tensor | None:
    """Orthonormal columns [d, r] that span the rows of all parts; None where r would be d."""
    rows = torch.cat(parts)
    if len(rows) >= rows.shape[1]:
        return None
    return torch.linalg.qr(rows.T).Q


def _spread(seen: Tensor) -> float:
    """The updates' mean distance to their mean; of a single one, or of equal ones, its length."""
    average = seen.mean(dim=0)
    spread = float(torch.linalg.vector_norm(seen - average, dim=1).mean())
    return spread if spread > 0 else float(torch.linalg.vector_norm(average))


def _disguises(
    own: Tensor, average: Tensor, spread: float, generator: np.random.Generator
) -> list[Tensor]:
    """What is added to each colluder's vector [b, d]."""
    noise = torch.from_numpy(generator.standard_normal(own.shape))
    noise *= spread / torch.linalg.vector_norm(noise, dim=1, keepdim=True)
    return [torch.zeros_like(noise), own - average, noise / 2, noise]


def _directions(seen: Tensor, average: Tensor, unit: float) -> Tensor:
    """As said above, each `unit` long: [n, d]."""
    centred = seen - average
    worst = seen[int((seen @ average).argmin())]
    found = [-average, -average.sign(), worst - average, -centred.square().mean(dim=0).sqrt()]
    gram = centred @ centred.T
    vectors = torch.linalg.eigh(gram).eigenvectors
    for axis in range(1, min(_AXES, len(seen) - 1) + 1):
        principal = vectors[:, -axis] @ centred
        found += [principal, -principal]
    lengths = [float(torch.linalg.vector_norm(one)) for one in found]
    pairs = zip(found, lengths, strict=True)
    return torch.stack([one * (unit / length) for one, length in pairs if length > 0])


def _drawn_like(own: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """`count` Gaussian vectors with the mean and covariance of the rows of `own` [b, d]."""
    average = own.mean(dim=0)
    if len(own) == 1:
        spread = torch.linalg.vector_norm(own) / own.shape[1] ** 0.5
        drawn = generator.standard_normal((count, own.shape[1]))
        return average + spread * torch.from_numpy(drawn)
    mixing = generator.standard_normal((count, len(own))) / (len(own) - 1) ** 0.5
    return average + torch.from_numpy(mixing) @ (own - average)
