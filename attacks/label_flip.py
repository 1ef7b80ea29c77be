"""Poison of the data: the corrupt client trains honestly, on the wrong labels."""

from torch import Tensor


def flip_labels(y: Tensor, num_classes: int) -> Tensor:
    """Labels y -> num_classes - 1 - y, same shape and dtype; `y` is left as it is."""
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; allowed are 1 and above")
    return num_classes - 1 - y
