"""`blackthorn simulate`: a recipe in one process, through the in-process engine."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from blackthorn.client_app.disclosure import kept_from_the_server
from blackthorn.launch.commands.progress import RoundPrinter
from blackthorn.recording.folder_place import REPORT
from blackthorn.server_app.prepared_run import PreparedRun
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.privacy_checks import claims_privacy
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies.options import Observer


def check(config: RunConfig) -> tuple[PreparedRun, EngineGrid]:
    """The run, ready to begin. Raises ConfigError with one line; nothing is written or started."""
    prepared = prepare(config)
    try:
        grid = EngineGrid(config, prepared.problem)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return replace(prepared, has_held_out=grid.has_held_out), grid


def simulate(
    config: RunConfig,
    console: Console,
    label: str = "",
    observers: Sequence[Observer] = (),
) -> dict[str, Any]:
    """Run `config`, with more `observers` of its rounds, and return the summary.

    Raises ConfigError with one line before anything is written or started.
    """
    # The progress lines name every rejected client already.
    logging.getLogger("blackthorn").setLevel(logging.ERROR)
    prepared, grid = check(config)
    for note in prepared.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    timed = not claims_privacy(config)
    printing = RoundPrinter(console, config.num_server_rounds, label, timed=timed)
    with kept_from_the_server(config), printing as printer:
        summary = execute(prepared, grid, observers, [printer])
    text = f"{label}run folder: {prepared.folder}"
    if (prepared.folder / REPORT).exists():
        text += f" (open {REPORT} in it)"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return summary
