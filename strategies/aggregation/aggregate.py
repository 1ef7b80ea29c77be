"""What every aggregation rule returns, and what every rule checks first."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

# Gram matrices are sums of squares in float64: up to here they cannot overflow. Every float32
# is below it.
_LARGEST = 1e140


@dataclass(frozen=True)
class Aggregate:
    """The result of an aggregation rule on updates [K, d].

    Attributes:
        vector: the aggregate [d], in the dtype of the updates.
        weights: float64 [K], what each row counted for. 0 is a row that was left out. For rules
            that are weighted sums of rows these are the coefficients; coordinate-wise rules treat
            all rows alike and give 1/K; `rage` gives the filter's weights w.
        survivors: bool [K], the rows that count; by default those with a weight above 0.
        iterations: passes of the rule's loop; 0 for rules without one.
    """

    vector: Tensor
    weights: Tensor
    survivors: Tensor = None  # type: ignore[assignment]
    iterations: int = 0

    def __post_init__(self) -> None:
        if self.survivors is None:
            object.__setattr__(self, "survivors", torch.as_tensor(self.weights) > 0)


def as_updates(updates: Any) -> Tensor:
    """`as_matrix` and `check_finite`."""
    values = as_matrix(updates)
    check_finite(values)
    return values


def as_matrix(updates: Any) -> Tensor:
    """The updates as a detached tensor [K, d] on the CPU, float32 or float64 as given.

    Raises:
        ValueError: for K = 0, or another shape or dtype.
    """
    values = torch.as_tensor(updates).detach().cpu()
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(f"updates must have the shape [K, d], d >= 1: got {list(values.shape)}")
    if values.shape[0] == 0:
        raise ValueError("there are no updates to aggregate: got K = 0, at least 1 is needed")
    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"updates must be float32 or float64: got {values.dtype}")
    return values


def check_finite(values: Tensor) -> None:
    """One pass over the updates [K, d]; `gram_matrix` sees for itself.

    Raises:
        ValueError: for a row that is not finite (beyond 1e140 for float64, whose squares would
            overflow). Screening drops such rows beforehand.
    """
    low, high = torch.aminmax(values)
    # As Python floats: in float32 the limit itself would be infinite.
    if not (float(low) >= -_LARGEST and float(high) <= _LARGEST):
        largest = values.abs().amax(dim=1).double()
        row = int(torch.nonzero(~(largest <= _LARGEST))[0])
        raise ValueError(
            f"updates must be finite and at most {_LARGEST:g} in size: row {row} is not"
        )


def check_num_corrupt(rule: str, num_corrupt: int, num_updates: int, needs: str, most: int) -> None:
    """Refuses a number of corrupt rows for which the rule's guarantee does not hold.

    Args:
        rule: the rule's name, for the message.
        num_corrupt: b, the assumed number of corrupt rows.
        num_updates: K.
        needs: the condition in words, such as "num_corrupt < K/3".
        most: the largest b the condition allows at this K, negative when it allows none.

    Raises:
        ValueError: unless 0 <= num_corrupt <= most.
    """
    if isinstance(num_corrupt, bool) or not isinstance(num_corrupt, Integral) or num_corrupt < 0:
        raise ValueError(f"num_corrupt must be an integer of at least 0: got {num_corrupt!r}")
    if num_corrupt > most:
        allowed = f"at most {most} is allowed" if most >= 0 else "K is too small for any"
        raise ValueError(
            f"{rule} needs {needs}: got num_corrupt = {num_corrupt} with K = {num_updates} "
            f"updates ({allowed})"
        )


def check_minority(rule: str, num_corrupt: int, num_updates: int) -> None:
    """Refuses a number of corrupt rows that is not a minority, 2b < K."""
    check_num_corrupt(rule, num_corrupt, num_updates, "num_corrupt < K/2", (num_updates - 1) // 2)


def uniform_aggregate(vector: Tensor, num_updates: int) -> Aggregate:
    """An aggregate in which all the rows took part alike."""
    weights = torch.full((num_updates,), 1 / num_updates, dtype=torch.float64)
    return Aggregate(vector, weights, torch.ones(num_updates, dtype=torch.bool))
