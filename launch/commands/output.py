"""What a command says: to people while it works, and at its end to whoever called it."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blackthorn.installation import CODE

if TYPE_CHECKING:
    from rich.table import Table as TerminalTable

    from blackthorn.reporting.report_facts import Table


def _print_version(asked: bool) -> None:
    if asked:
        print(f"blackthorn {CODE}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        help="The version and a digest of the code, the same on every machine of a federation.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result, and errors.")]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="The result as one JSON object on stdout; all else on stderr."),
]


def people_console(quiet: bool, as_json: bool) -> Console:
    """Where a command tells people how far it is."""
    return Console(quiet=quiet, stderr=as_json)


def terminal_table(told: "Table") -> "TerminalTable":
    """A page's table as a terminal has it; what is too wide is folded, never cut."""
    from rich.table import Table as TerminalTable

    table = TerminalTable(title=told.title)
    for head in told.heads:
        table.add_column(head, overflow="fold")
    for row in told.rows:
        table.add_row(*row)
    return table


def print_json(result: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    # Brings Flower along, which takes seconds: not for everybody who asks for help.
    from blackthorn.recording.line_log import finite

    print(json.dumps(finite(dict(result))))


@contextmanager
def failures_told(as_json: bool) -> Iterator[None]:
    """With --json also a run that fails says so on stdout, as an object with status and reason.

    One that was interrupted says how to go on with it; a failed one does so after its reason.
    """
    try:
        yield
    except RuntimeError as error:
        if as_json:
            print_json({"status": "failed", "reason": str(error)})
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        tell_how_to_go_on(end)
        raise


def tell_how_to_go_on(error: BaseException) -> None:
    """The command that resumes the run that ended with `error`, if there is one."""
    from blackthorn.recording.resume import resumable

    if folder := resumable(error):
        print(f"to go on with it: {again_with_resume(folder)}", file=sys.stderr)


def again_with_resume(folder: str) -> str:
    """This command once more, with the run folder to go on in."""
    return shlex.join(["blackthorn", *sys.argv[1:], "--set", f"resume={folder}"])
