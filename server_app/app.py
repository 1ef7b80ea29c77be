"""The ServerApp: what Flower starts where the server runs."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server_app.config import ConfigError, make_config
from server_app.operator_log import show_log, tell, tell_round, tell_start
from server_app.run import execute, prepare

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run configuration says; a failed run raises, so that Flower says failed."""
    show_log()
    try:
        prepared = prepare(make_config(context.run_config))
        tell_start(prepared.config, prepared.folder)
        for note in prepared.notes:
            print(note, flush=True)
        tell("summary", execute(prepared, grid, [tell_round]))
    except Exception as error:
        reason = str(error) or type(error).__name__
        tell("failed", {"reason": reason, "configuration": isinstance(error, ConfigError)})
        raise
