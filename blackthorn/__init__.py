"""Blackthorn: a Flower app and strategy library for federated learning.

`blackthorn.strategies` and `blackthorn.attacks` are the library. In a wheel they lie in this
folder; in a checkout they lie beside it, because Flower apps run from flat packages.
"""

from pathlib import Path

_here = Path(__file__).resolve().parent
if not (_here / "strategies").is_dir():
    __path__.append(str(_here.parent))
