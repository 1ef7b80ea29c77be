"""From the key `algorithm` to the class that it names, imported when it is needed."""

from blackthorn.settings.catalogue import facts_of, load
from blackthorn.settings.keys import Keys
from blackthorn.settings.privacy_checks import is_noised

from .base import FederatedStrategy


def algorithm_class(config: Keys) -> type[FederatedStrategy]:
    """The Strategy that runs: the noised one where noise for privacy is asked for."""
    facts = facts_of(config.algorithm)
    found: type[FederatedStrategy] = load(facts.noised if is_noised(config) else facts.where)
    return found
