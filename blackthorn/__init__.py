"""Blackthorn: a Flower app and strategy library for federated learning.

`blackthorn.strategies` and `blackthorn.attacks` are the library; `blackthorn.simulate` runs a
recipe, `blackthorn.sweep` many of its kind, `blackthorn.open_run` opens what a run has left, and
`blackthorn.compare` puts several beside each other. In a wheel the packages lie in this
folder; in a checkout they lie beside it, and links lead from here to them.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blackthorn.launch.commands.finished_run import Run, compare, open_run, simulate, sweep

__all__ = ["Run", "__version__", "compare", "open_run", "simulate", "sweep"]

__version__ = version("blackthorn")


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: whoever wants a strategy needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("blackthorn.launch.commands.finished_run"), name)
