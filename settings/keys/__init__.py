"""All keys of the run configuration, each declared in the group it belongs to.

The Flower defaults in pyproject.toml, the table in the docs and the error messages all come from
these declarations (tests compare them).
"""

from blackthorn.settings.keys.learning import Algorithm, Learning
from blackthorn.settings.keys.posterior import Posterior
from blackthorn.settings.keys.privacy import Privacy
from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.settings.keys.robustness import Adversary, CorruptClients, Rule
from blackthorn.settings.keys.running import Running
from blackthorn.settings.keys.server import Output, ServerStep


# Keys are listed from the last base to the first.
class Keys(
    Running,
    Adversary,
    Privacy,
    CorruptClients,
    Output,
    Rule,
    ServerStep,
    Posterior,
    Learning,
    ProblemKeys,
    Algorithm,
):
    """Everything that decides what a run computes, each value checked on its own."""
