"""Which runs a sweep has: every combination of the values, with its seeds, and where each goes."""

import contextlib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from blackthorn.launch.commands.recipes import INITIAL_MODEL, recipe_config
from blackthorn.launch.commands.simulate import check
from blackthorn.recording.run_folder import read_summary
from blackthorn.settings.config import ConfigError, RunConfig, parse_setting, to_mapping
from blackthorn.settings.key_facts import place_keys
from blackthorn.settings.own_code import OWN_CODE_KEYS, is_own_code

# What a sweep chooses for each of its runs.
_ITS_OWN = ("output-dir", "resume", "ledger")

Choice = Mapping[str, Any]


@dataclass(frozen=True)
class SweepRun:
    """One run: the values that were chosen for it, its configuration, and its folder."""

    choice: Choice
    config: RunConfig
    folder: Path

    @property
    def summary(self) -> dict[str, Any] | None:
        """What it ended with; None where it has not completed."""
        summary = read_summary(self.folder) if self.folder.exists() else None
        return summary if summary and summary["status"] == "completed" else None

    @property
    def said(self) -> str:
        """Which one it is, for a line."""
        return ", ".join([*said(self.choice), f"seed={self.config.seed}"])


def plan(
    recipe: Path, choices: Mapping[str, Sequence[Any]], seeds: int, folder: Path
) -> list[SweepRun]:
    """Every run, checked as far as it can be before it begins. Raises ConfigError with one line."""
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} is not allowed: at least 1")
    for key, values in choices.items():
        if not values:
            raise ConfigError(f"--set {key}= has no value: write --set {key}=VALUE,VALUE")
        if len({json.dumps(value) for value in values}) < len(values):
            raise ConfigError(f"--set {key}={','.join(map(str, values))} has a value twice")
        if key in _ITS_OWN:
            raise ConfigError(f"{key} = {values[0]} is not allowed in a sweep: {_WHY[key]}")
    if len(choices.get("seed", ())) > 1:
        raise ConfigError("seed has several values: a sweep takes them from --seeds")
    varying = [key for key, values in choices.items() if len(values) > 1]
    runs, to_check = [], []
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        config = recipe_config(recipe, (), chosen)
        for key in _ITS_OWN:
            if getattr(config, key.replace("-", "_")):
                raise ConfigError(f"{key} of {recipe} is not allowed in a sweep: {_WHY[key]}")
        to_check.append(config)
        choice = {key: chosen[key] for key in varying}
        for seed in range(config.seed, config.seed + seeds):
            own = recipe_config(recipe, (), {**chosen, "seed": seed})
            runs.append(SweepRun(choice, own, folder / _name(choice, own)))
    for config in to_check:
        check(config)
    return runs


_WHY = {
    "output-dir": "each run has a folder of its own, in that of --output-dir",
    "resume": "the same command goes on with it",
    "ledger": "its runs would take the budget from each other; each has its own",
}


def parse_choices(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Keys and lists of values of --set key=value,value; a value with commas stands in quotes or in
    a TOML array. Raises ConfigError with one line."""
    choices: dict[str, list[Any]] = {}
    for text in settings:
        key, equals, listed = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ConfigError(f"--set {text} is not allowed: write --set key=value,value")
        if key in choices:
            raise ConfigError(f"--set {key} is given twice: write --set {key}=VALUE,VALUE")
        try:
            whole = tomllib.loads(f"value = {listed}")["value"]
        except tomllib.TOMLDecodeError:
            parts = [part.strip() for part in listed.split(",")]
            if not all(parts):
                raise ConfigError(
                    f'--set {text} is not allowed: it has an empty value (write "" for one)'
                ) from None
            choices[key] = [parse_setting(f"{key}={part}")[1] for part in parts]
            continue
        choices[key] = whole if isinstance(whole, list) else [parse_setting(f"{key}={listed}")[1]]
    return choices


def said(choice: Choice) -> list[str]:
    """key=value of each."""
    return [f"{key}={text_of(value)}" for key, value in choice.items()]


def text_of(value: Any) -> str:
    """A value as it is written in a setting."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(choice: Choice, config: RunConfig) -> str:
    """The folder's: what was chosen, and a digest of all that decides what the run computes."""
    values = {key: v for key, v in to_mapping(config).items() if key not in place_keys()}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for key in (*OWN_CODE_KEYS, INITIAL_MODEL):
        value = str(to_mapping(config)[key])
        file = value.rpartition(":")[0] if is_own_code(value) else value
        if key == INITIAL_MODEL or is_own_code(value):
            with contextlib.suppress(OSError):
                digest.update(Path(file).read_bytes())
    words = [*said(choice), f"seed={config.seed}"]
    slug = re.sub(r"[^\w.=+-]+", "-", "_".join(words))[:80]
    return f"{slug}-{digest.hexdigest()[:8]}"
