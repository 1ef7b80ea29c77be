"""The ServerApp: what Flower starts where the server runs."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from blackthorn.installation import difference, sent_from
from blackthorn.recording.interrupted import going_on
from blackthorn.recording.operator_log import (
    RoundTold,
    show_log,
    tell,
    tell_again,
    tell_operator,
    tell_start,
)
from blackthorn.recording.run_folder import read_summary
from blackthorn.recording.run_notes import note_folder, noted_folder
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import ConfigError, make_config


def app_of(bundle: Path) -> ServerApp:
    """The ServerApp for a run that came with the Flower app in the folder `bundle`."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, context, sent_from(bundle))

    return app


def main(grid: Grid, context: Context, sent: str | None = None) -> None:
    """Run what the run configuration says; a failed run raises, so that Flower says failed.

    `sent`: the CODE of the Blackthorn that sent the run, where it is known. ConfigError for another
    than this one.
    """
    show_log()
    try:
        unlike = difference(sent, "what sent the run") if sent is not None else None
        if unlike is not None:
            raise ConfigError(unlike)
        config = make_config(context.run_config)
        folder = noted_folder(context.run_id)
        if folder is not None:
            summary = read_summary(folder)
            if summary is not None and summary["status"] == "completed":
                # It was done, and died before Flower knew.
                tell_again(folder, config.num_server_rounds)
                tell("summary", summary)
                return
            config = going_on(config, folder)
        prepared = prepare(config)
        note_folder(context.run_id, prepared.folder)
        tell_start(prepared.config, prepared.folder)
        if prepared.saved is not None and folder is not None:
            tell_again(folder, prepared.saved.state.server_round)
        tell("notes", prepared.notes)
        told = [RoundTold(prepared.config)]
        tell("summary", execute(prepared, grid, [tell_operator], told))
    except Exception as error:
        reason = str(error) or type(error).__name__
        tell("failed", {"reason": reason, "configuration": isinstance(error, ConfigError)})
        raise
