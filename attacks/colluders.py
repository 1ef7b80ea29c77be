"""What the corrupt clients of a round know together, and say with one voice."""

import torch
from torch import Tensor


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
