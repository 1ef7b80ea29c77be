"""The ServerApp: what Flower starts where the server runs."""

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server_app.config import make_config
from server_app.run import execute, prepare

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run configuration says; a failed run raises, so that Flower says failed."""
    logging.getLogger("blackthorn").setLevel(logging.INFO)
    prepared = prepare(make_config(context.run_config))
    execute(prepared, grid)
