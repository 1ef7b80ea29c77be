"""The first model's weights out of a file, which no code is run of."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_PICKLED = (".pt", ".pth")


def load_weights(module: nn.Module, path: str, *, frozen_alone: bool = False) -> None:
    """Put the file's state_dict into the module, tied entries by any of their names.

    `frozen_alone`: only where the module has frozen parameters, which the server does not send.
    Raises ValueError, one line, for a file that cannot be read, holds anything but tensors, those
    of another module, or numbers that are not finite.
    """
    if frozen_alone and all(one.requires_grad for one in module.parameters()):
        return
    where = f"initial-model = {path} is not allowed"
    state = _read(Path(path).expanduser(), where)
    own = {name: v for name, v in module.state_dict().items() if isinstance(v, Tensor)}
    surplus = [name for name in state if name not in own]
    if surplus:
        raise ValueError(f"{where}: the model has no {surplus[0]!r}")
    given = {own[name].data_ptr() for name in state}
    absent = [n for n, v in own.items() if n not in state and v.data_ptr() not in given]
    if absent:
        raise ValueError(f"{where}: it lacks the model's {absent[0]!r}")
    for name, value in state.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"{where}: {name!r} has shape {tuple(value.shape)}, of the model it is "
                f"{tuple(own[name].shape)}"
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"{where}: {name!r} has values that are not finite")
    module.load_state_dict(state, strict=False)


def _read(path: Path, where: str) -> Mapping[str, Tensor]:
    # Imported here: few runs begin with a file.
    from safetensors.torch import load_file

    if path.suffix not in (".safetensors", *_PICKLED):
        raise ValueError(f"{where}: allowed are .safetensors, {', '.join(_PICKLED)} files")
    state: Any
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            # Of the pickle's protocol, before the line that says what is wrong.
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{where}: there is no such file") from None
    except pickle.UnpicklingError:
        raise ValueError(
            f"{where}: it holds more than weights, and would run code; save model.state_dict()"
        ) from None
    # The readers meet a torn file with an IndexError, an EOFError, a RuntimeError, ...
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        raise ValueError(f"{where}: it cannot be read ({type(error).__name__}: {words})") from None
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{where}: it holds no state_dict of tensors")
    return state
