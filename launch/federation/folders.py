"""Folders that an option names, made where they are missing."""

import os
from pathlib import Path

from blackthorn.settings.config import ConfigError


def make_folder(folder: Path, option: str) -> None:
    """Make the folder, readable by its owner only. ConfigError where none can be made or used."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} cannot be written to")
