"""The ClientApp, and what makes anybody's ClientApp take part.

`mod` carries out what a strategy's rule does to an update, and `Round` what it does to the steps of
a training loop of one's own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blackthorn.client_app.round import Round
    from blackthorn.client_app.taking_part import Mod, mod

__all__ = ["Mod", "Round", "mod"]

_PLACES = {"Round": "round", "Mod": "taking_part", "mod": "taking_part"}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: a bundle's component needs none of it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"blackthorn.client_app.{_PLACES[name]}"), name)
