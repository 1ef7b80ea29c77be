"""The ServerApps that `grpc_rounds.py` times; they travel in the bundle with our ClientApp.

Each writes the seconds of its rounds, from one global model to the next, into its output folder.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from blackthorn.flower_port.programs import pull_every
from blackthorn.flower_port.transports import Polling
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import make_config
from blackthorn.strategies.reports import RoundReport

SECONDS = "seconds.json"

ours = ServerApp()
fedavg = ServerApp()
fedavg_quick = ServerApp()


class Clock:
    """Moments at which a round's model was there; the first is that before round 1."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def note(self, without: float = 0.0) -> None:
        """Now, less the seconds of what does not count."""
        self._moments.append(time.perf_counter() - without)

    def write(self, folder: Path) -> None:
        """The seconds of the rounds as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        pairs = zip(self._moments, self._moments[1:], strict=False)
        (folder / SECONDS).write_text(json.dumps([after - before for before, after in pairs]))


@ours.main()
def run_ours(grid: Grid, context: Context) -> None:
    """The run of our own ServerApp: strategy, observers and run folder."""
    prepared = prepare(make_config(context.run_config))
    clock = Clock()

    def note(report: RoundReport) -> None:
        # The last round's model is always evaluated, which FedAvg's is not.
        clock.note(without=report.seconds.get("evaluation", 0.0))

    execute(prepared, grid, [note])
    clock.write(prepared.folder)


@fedavg.main()
def run_fedavg(grid: Grid, context: Context) -> None:
    """Flower's FedAvg as it is: its grid looks for replies every three seconds."""
    _average(grid, context)


@fedavg_quick.main()
def run_fedavg_quick(grid: Grid, context: Context) -> None:
    """Flower's FedAvg, on a grid that looks for replies as often as our strategy does."""
    pull_every(Polling().interval(1))
    _average(grid, context)


class _TimedFedAvg(FedAvg):
    """FedAvg that notes when each round's model is there."""

    clock = Clock()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As FedAvg's."""
        if server_round == 1:
            self.clock.note()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As FedAvg's."""
        result = super().aggregate_train(server_round, replies)
        self.clock.note()
        return result


def _average(grid: Grid, context: Context) -> None:
    config = make_config(context.run_config)
    nodes = config.num_clients
    strategy = _TimedFedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    initial = ArrayRecord(prepare(config).problem.state())
    strategy.start(grid, initial, config.num_server_rounds, config.round_timeout)
    strategy.clock.write(Path(config.output_dir))
