"""Which entries of a model's state_dict belong to w, and what the others are.

Running statistics describe data, and nobody trains them; a tied parameter has second names; and
frozen parameters, counters and masks stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

Statistics = Literal["average", "server", "local"]
STATISTICS: tuple[Statistics, ...] = ("average", "server", "local")
# In which a model may be computed that travels in a finer one; the coarsest first.
_COARSE = (torch.bfloat16, torch.float16, torch.float32)
# BatchNorm's running statistics and counter are buffers: they describe data, nobody trains them.
VARIANCE = "running_var"
BUFFER_SUFFIXES = ("running_mean", VARIANCE, "num_batches_tracked")


def is_trainable(name: str, dtype: np.dtype) -> bool:
    """Whether an entry of which no more is known belongs to w: floating point and not a running
    statistic."""
    return np.issubdtype(dtype, np.floating) and not name.endswith(BUFFER_SUFFIXES)


@dataclass(frozen=True)
class Entries:
    """What the entries of a state_dict are.

    `parameters`: trainable ones, each once. `statistics`: floating-point buffers. `copies`: the
    second names of tied parameters, each with the first. `frozen`: parameters that nobody trains.
    `bfloat16`: parameters that a module holds in bfloat16, which NumPy does not have.
    """

    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    bfloat16: tuple[str, ...] = ()

    @classmethod
    def by_name(cls, state: Mapping[str, np.ndarray]) -> "Entries":
        """Of arrays alone: what is floating point is a parameter unless it is named like one of
        BatchNorm's statistics. Ties and what is frozen cannot be seen."""
        floating = [name for name in state if np.issubdtype(state[name].dtype, np.floating)]
        parameters = tuple(name for name in floating if is_trainable(name, state[name].dtype))
        statistics = tuple(name for name in floating if name not in parameters)
        return cls(parameters, statistics)

    @classmethod
    def of_module(cls, module: nn.Module) -> "Entries":
        """Of a module, which knows all of it."""
        first: dict[int, str] = {}
        copies, parameters, frozen, statistics = {}, [], [], []
        bfloat16 = []
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, nn.Parameter):
                if value.is_floating_point():
                    statistics.append(name)
            elif id(value) in first:
                copies[name] = first[id(value)]
            elif value.requires_grad and value.is_floating_point():
                first[id(value)] = name
                parameters.append(name)
                if value.dtype == torch.bfloat16:
                    bfloat16.append(name)
            else:
                frozen.append(name)
        return cls(tuple(parameters), tuple(statistics), copies, tuple(frozen), tuple(bfloat16))


def state_of(module: nn.Module) -> dict[str, np.ndarray]:
    """The module's state_dict as arrays. NumPy has no bfloat16: such entries become float32."""
    state = {}
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor):
            wide = value.float() if value.dtype == torch.bfloat16 else value
            state[name] = wide.detach().cpu().numpy().copy()
    return state


def as_held(
    state: Mapping[str, np.ndarray], trained: Mapping[str, np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """The entries `names` of `state` as the model held them that became `trained`: where all
    trained values of an entry are numbers of a coarser dtype, it was computed in that, and what was
    loaded into it was rounded.

    What is measured from the entries as they were sent takes that rounding for an update.
    """
    held = {}
    for name in names:
        sent = torch.from_numpy(np.ascontiguousarray(state[name]))
        moved = torch.from_numpy(np.array(trained[name], dtype=state[name].dtype))
        coarser = (d for d in _COARSE if torch.finfo(d).eps > torch.finfo(sent.dtype).eps)
        found = next((d for d in coarser if torch.equal(rounded(moved, d), moved)), sent.dtype)
        held[name] = rounded(sent, found).numpy()
    return held


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of `dtype` that are nearest to `values`, in the dtype of these."""
    return values.to(dtype).to(values.dtype)
