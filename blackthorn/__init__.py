"""Blackthorn: a Flower app and strategy library for federated learning.

`blackthorn.strategies` and `blackthorn.attacks` are the library. In a wheel the packages lie in
this folder; in a checkout they lie beside it, and links lead from here to them.
"""

from importlib.metadata import version

__version__ = version("blackthorn")
