"""What goes together with a project of one's own, and with a trainer."""

from blackthorn.settings.catalogue import CLOSED_FORM, OWN_PROJECT, TRUSTED, facts_of
from blackthorn.settings.derived import trains_alone
from blackthorn.settings.keys import Keys
from blackthorn.settings.own_code import is_own_code
from blackthorn.settings.robustness_checks import rule_of


def check_project(config: Keys) -> None:
    """Raises ValueError, one line, for the first key that does not go with the others."""
    if config.task == OWN_PROJECT:
        _check_own_project(config)
    if not trains_alone(config):
        return
    if config.trainer:
        trained = f"trainer = {config.trainer}"
    elif config.local_optimizer != "sgd":
        trained = f"local-optimizer = {config.local_optimizer}"
    else:
        trained = f"task = {config.task}"
    if config.task in CLOSED_FORM:
        raise ValueError(
            f"{trained} is not allowed with task {config.task}: its clients have no examples, and "
            'their steps are its own; set trainer = "" and local-optimizer = sgd'
        )
    if config.local_dp_sgd:
        raise ValueError(
            f"local-dp-sgd = true is not allowed with {trained}: nobody knows what a loop of its "
            "own makes of a single example; set local-dp-sgd = false, and noise-multiplier or "
            "epsilon for a claim of whole clients"
        )
    if rule_of(config) in TRUSTED:
        raise ValueError(
            f"aggregator = {rule_of(config)} is not allowed with {trained}: the server learns from "
            "trusted data by SGD alone; set another aggregator"
        )
    if facts_of(config.algorithm).samples_posterior and config.local_optimizer != "sgd":
        raise ValueError(
            f"local-optimizer = {config.local_optimizer} is not allowed with algorithm "
            f"{config.algorithm}, whose steps are its own: set local-optimizer = sgd"
        )


def _check_own_project(config: Keys) -> None:
    for key in ("data", "model"):
        name = getattr(config, key)
        if not is_own_code(name):
            raise ValueError(
                f"{key} = {name!r} is not allowed with task {OWN_PROJECT}: your own FILE.py:NAME "
                "is needed"
            )
    if config.attack == "label-flip":
        raise ValueError(
            f"attack = label-flip is not allowed with task {OWN_PROJECT}: what its labels are only "
            "its own code knows; let data itself flip those of some clients"
        )
