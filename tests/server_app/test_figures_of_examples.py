"""What a reply says its client's examples have spent is written down only where it can be true."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from digits_runs import configuration
from flwr.app import Message

from blackthorn.recording.run_folder import read_metrics
from blackthorn.server_app.run import execute, prepare
from blackthorn.simulation.engine import EngineGrid
from blackthorn.wire import SAMPLE_EPSILON

DP_SGD = {"local_dp_sgd": True, "dp_sgd_sample_rate": 0.2, "batch_size": 10, "instruments": False}


class Liars(EngineGrid):
    """Clients 0 and 1 say another figure than they have spent, and the others nothing else."""

    said = 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies[:2]:
            for record in reply.content.metric_records.values():
                record[SAMPLE_EPSILON] = self.said
        return replies


def written(folder: Path, said: float, **options: Any) -> list[dict[str, float]]:
    prepared = prepare(configuration(folder, num_server_rounds=2, num_clients=4, **options))
    grid = Liars(prepared.config, prepared.problem)
    grid.said = said
    execute(prepared, grid)
    return [line.get("sample_epsilon", {}) for line in read_metrics(folder) if line["round"]]


@pytest.mark.parametrize("options", [{}, {**DP_SGD, "claim_privacy": False}])
def test_where_nothing_is_claimed_none_is_written_down(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    assert written(tmp_path, 0.001, **options) == [{}, {}]


def test_less_than_what_was_asked_for_is_a_lie(tmp_path: Path) -> None:
    for figures in written(tmp_path / "less", 0.001, **DP_SGD):
        assert set(figures) == {"2", "3"}
    # A client that has been asked more often than this server knows of may say so.
    for figures in written(tmp_path / "more", 1000.0, **DP_SGD):
        assert set(figures) == {"0", "1", "2", "3"}
