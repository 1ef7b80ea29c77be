"""A node that is no SuperNode: it speaks Flower's Fleet protocol itself and never runs the app.

`python -m blackthorn.attacks.rogue --superlink HOST:PORT --client ID --behaviour NAME` enrols as a
client like any other and answers each train message with a reply that no honest program would send.
"""

from .behaviours import BEHAVIOURS

__all__ = ["BEHAVIOURS"]
