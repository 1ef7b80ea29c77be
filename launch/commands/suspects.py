"""`blackthorn suspects`: whom the rounds of a run convict."""

from pathlib import Path
from typing import Annotated

import typer

from blackthorn.launch.commands.output import AsJson, people_console, print_json
from blackthorn.settings.config import ConfigError


def suspects(
    run: Annotated[Path, typer.Argument(help="Run folder, of a run that has ended or goes on.")],
    as_json: AsJson = False,
) -> None:
    """Which clients stand out from all others so far that it is no chance.

    Example: blackthorn suspects runs/my-run
    """
    from blackthorn.recording.suspects import suspects_of

    try:
        found = suspects_of(run)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    lines = [f"client {one['client']}: p = {one['p']:g}" for one in found["clients"]]
    if found["said"]:
        lines.append(found["said"])
    console = people_console(quiet=False, as_json=as_json)
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(found)
