"""What follows from the keys' declarations: which there are of a kind, and which a run reads."""

from collections.abc import Callable

from blackthorn.settings.catalogue import facts_of
from blackthorn.settings.declaration import (
    BY_ALGORITHM,
    FREE,
    OF_A_CHAIN,
    PLACE,
    SERVER,
    Mark,
    Reader,
    kebab,
)
from blackthorn.settings.keys import Keys
from blackthorn.settings.own_code import is_own_code
from blackthorn.settings.privacy_checks import is_noised
from blackthorn.settings.robustness_checks import rule_of


def marked(mark: Mark) -> list[str]:
    """The keys with that mark."""
    return [kebab(name) for name, field in Keys.model_fields.items() if mark in field.metadata]


def server_keys() -> list[str]:
    """Keys that are the server's business alone: no client reads them, and none is sent them."""
    return marked(SERVER)


def place_keys() -> list[str]:
    """Keys that say where on the server's machine something is."""
    return marked(PLACE)


def free_on_resume() -> list[str]:
    """What a resumed run may have otherwise than before."""
    return marked(FREE)


def free_between_chains() -> list[str]:
    """In what the chains of one posterior may differ."""
    return [*marked(FREE), *marked(OF_A_CHAIN)]


def readers_of(key: str) -> list[Reader]:
    """Who reads the key; empty: every run, or by its algorithm's facts."""
    return [mark for mark in _metadata(key) if isinstance(mark, Reader)]


def unread(config: Keys, key: str) -> str | None:
    """Why nothing in the run reads the key, in words; None where something does."""
    if BY_ALGORITHM in _metadata(key):
        if is_own_code(config.algorithm) or key in facts_of(config.algorithm).keys:
            return None
        return f"algorithm = {config.algorithm}"
    reasons = [_chooses_another(config, reader) for reader in readers_of(key)]
    return next(iter(reasons), None) if None not in reasons else None


def unused_settings(config: Keys) -> list[str]:
    """One line for each key that is set and has no effect."""
    rule, own = rule_of(config), facts_of(config.algorithm).rule
    notes = []
    if own not in ("mean", rule):
        notes.append(f"aggregator = {rule} replaces the rule of algorithm {config.algorithm}")
    for name, field in Keys.model_fields.items():
        value = getattr(config, name)
        why = unread(config, kebab(name)) if value != field.default else None
        if why is not None:
            notes.append(f"{kebab(name)} = {_said(value)} is not used: {why}")
    return notes


def _chooses_another(config: Keys, reader: Reader) -> str | None:
    """What the reader's key chooses in its place; None where it is chosen, and itself read."""
    key = reader.chooser
    if key in _CHOSEN:
        value, said = _CHOSEN[key](config)
    else:
        value = getattr(config, key.replace("-", "_"))
        said = f"{key} = {_said(value)}"
    # A task of the user's own may read what it likes.
    if key == "task" and is_own_code(config.task):
        return None
    if (value in reader.values) == reader.other:
        return said
    return unread(config, key) if key in _KEYS else None


def _rule(config: Keys) -> tuple[object, str]:
    return rule_of(config), f"aggregator = {rule_of(config)}"


def _model(config: Keys) -> tuple[object, str]:
    return config.model.partition("-")[0], f"model = {config.model}"


def _noise(config: Keys) -> tuple[object, str]:
    return is_noised(config), f"algorithm = {config.algorithm} adds no noise"


# What chooses by something else than the bare value of its key.
_CHOSEN: dict[str, Callable[[Keys], tuple[object, str]]] = {
    "aggregator": _rule,
    "model": _model,
    "noise": _noise,
}
_KEYS = frozenset(kebab(name) for name in Keys.model_fields)


def _metadata(key: str) -> list[object]:
    return Keys.model_fields[key.replace("-", "_")].metadata


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
