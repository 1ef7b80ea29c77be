"""The ClientApp, and what makes anybody's ClientApp take part.

`mod` carries out what a strategy's rule does to an update, and `Round` what it does to the steps of
a training loop of one's own; `TrainerRound` is what a recipe's trainer is given.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blackthorn.client_app.round import Round
    from blackthorn.client_app.taking_part import Mod, mod
    from blackthorn.client_app.trained_alone import TrainerRound

__all__ = ["Mod", "Round", "TrainerRound", "mod"]

_PLACES = {
    "Round": "round",
    "TrainerRound": "trained_alone",
    "Mod": "taking_part",
    "mod": "taking_part",
}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: a bundle's component needs none of it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"blackthorn.client_app.{_PLACES[name]}"), name)
