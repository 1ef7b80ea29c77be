"""What may be released of a run with a claim of clients' privacy, and what its commands show, says
of who took part only what the noised models say."""

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from digits_runs import EVERYTHING, SAMPLE, configuration
from rich.console import Console

from blackthorn.launch.commands.progress import round_line
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.run_log import RunLog
from blackthorn.recording.client_history import read_lines
from blackthorn.recording.folder_place import METRICS, WITHHELD
from blackthorn.recording.operator_log import RoundTold, tell_again, tell_operator
from blackthorn.strategies import PrivacyPlan
from blackthorn.strategies.participation import CohortPlan
from blackthorn.strategies.private_averaging import PrivateAveraging

ROUNDS = 3
# One of them never answers.
MISSING: dict[str, Any] = {"attack": "raise", "num_byzantine": 1}
CLAIMS: dict[str, dict[str, Any]] = {
    "central": MISSING,
    "noise at the clients": {"noise_location": "client"},
    "of examples, too": SAMPLE,
    "in turns": {**MISSING, "participation": "rotating", "bands": 2, "sample_rate": None},
}


class _Alike:
    """Runs of which nothing differs but who is asked: their models get no update and no noise, and
    their names and moments are the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        places = "blackthorn.recording.folder_place.time", "blackthorn.strategies.ledger.secrets"
        monkeypatch.setattr(places[0], SimpleNamespace(time_ns=lambda: 10**18))
        monkeypatch.setattr(places[1], SimpleNamespace(token_hex=lambda size: "0a" * size))
        monkeypatch.setattr(PrivateAveraging, "_noised", _nothing)

    def run(self, folder: Path, cohorts: Mapping[int, list[int]], **claim: Any) -> str:
        """What it shows; `cohorts`: who is asked in which round."""

        def drawn(plan: PrivacyPlan, clients: Any, randomness: Any, server_round: int) -> Any:
            del plan, clients, randomness
            return CohortPlan.of(cohorts[server_round])

        self._patch.setattr(PrivacyPlan, "draw", drawn)
        screen = StringIO()
        values = {**EVERYTHING, "num_server_rounds": ROUNDS, **claim}
        config = configuration(folder, **{k: v for k, v in values.items() if v is not None})
        simulate(config, Console(file=screen, width=200), observers=[tell_operator])
        told = RoundTold(config)
        for entry in read_lines(folder / METRICS):
            told.round(entry)
        return screen.getvalue().replace(str(folder), "FOLDER")


_REAL = PrivateAveraging._noised


def _nothing(strategy: PrivateAveraging, *arguments: Any) -> torch.Tensor:
    return torch.zeros_like(_REAL(strategy, *arguments))


def released(folder: Path) -> dict[str, bytes]:
    """All that is not on the list of what stays with the operator, by its place."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        str(place): path.read_bytes()
        for place, path in files.items()
        if not any(Path(place.parts[0]).match(pattern) for pattern in WITHHELD)
    }


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
def test_who_took_part_changes_nothing_that_is_released_or_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    claim: dict[str, Any],
) -> None:
    """Whatever is added to a run's folder, and is not kept from others, is compared."""
    alike = _Alike(monkeypatch)
    nobody: dict[int, list[int]] = {1: [], 2: [], 3: []}
    # Where clients take turns none may be in two rounds on end.
    many = {1: [0, 1, 3], 2: [2], 3: [0, 3]}
    shown, followed, folders = [], [], []
    for name, cohorts in (("few", nobody), ("many", many)):
        folders.append(tmp_path / name / "run")
        capsys.readouterr()
        shown.append(alike.run(folders[-1], cohorts, **claim))
        log = RunLog(rounds=ROUNDS)
        followed.append([round_line(e, log.rounds) for e in log.read(capsys.readouterr().out)])
    # They did differ, and the operator knows: by the file, and by what the server's output counts.
    few, more = (read_lines(folder / "operator.jsonl")[1:] for folder in folders)
    assert [line["invited"] for line in few + more] == [0, 0, 0, 3, 1, 2]
    assert bool(log.rejections) == ("attack" in claim)
    assert shown[0] == shown[1]
    assert followed[0] == followed[1]
    few_files, many_files = (released(folder) for folder in folders)
    assert {"summary.json", "report.html", "metrics.jsonl"} <= few_files.keys()
    assert [
        name for name in few_files | many_files if few_files.get(name) != many_files.get(name)
    ] == []
    # Told again by a server that goes on, it is the same, and counts the same.
    tell_again(folders[1], ROUNDS)
    again = RunLog(rounds=ROUNDS)
    lines = [round_line(entry, ROUNDS) for entry in again.read(capsys.readouterr().out)]
    assert again.rejections == log.rejections
    assert len(lines) == len(followed[1])
