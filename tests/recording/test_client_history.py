"""What became of every client: written as it happens, read again, drawn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_runs import run
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from blackthorn.recording.client_history import STATES, ClientHistory, history_entry, read_history
from blackthorn.reporting.client_history_plot import COLOURS, merged, plot_client_history
from blackthorn.strategies import Rejection, RoundReport


def report(server_round: int, **fields: Any) -> RoundReport:
    model = torch.zeros(1)
    base = {"invited": [], "accepted": [], "rejected": [], "local_lr": 0.1, "model": model}
    return RoundReport(server_round=server_round, **{**base, **fields})


ROUNDS = [
    report(
        1,
        invited=[0, 2, 5, 7],
        accepted=[0, 5],
        filtered=[5],
        weights=torch.tensor([0.25, 0.0], dtype=torch.float64),
        rejected=[Rejection(2, "NaN"), Rejection(7, "late", replied=False)],
    ),
    report(
        2,
        invited=[0, 7],
        accepted=[0],
        rejected=[Rejection(7, "no\tdata")],
        skipped="1 reply, fewer than 2",
    ),
    report(
        3,
        invited=[2, 5],
        accepted=[2, 5],
        weights=torch.tensor([1 / 3, 0.75], dtype=torch.float64),
    ),
]


def history() -> ClientHistory:
    return ClientHistory.of(json.loads(json.dumps(history_entry(r))) for r in ROUNDS)


def test_a_line_has_clients_by_state_weights_and_reasons() -> None:
    assert history_entry(ROUNDS[0]) == {
        "round": 1,
        "clients": {"kept": [0], "filtered": [5], "rejected": [2], "no reply": [7]},
        "weights": {"0": 0.25, "5": 0.0},
        "reasons": {"2": "NaN", "7": "late"},
    }
    assert history_entry(ROUNDS[1]) == {
        "round": 2,
        "clients": {"skipped": [0], "rejected": [7]},
        "reasons": {"7": "no\tdata"},
    }
    assert history_entry(report(9)) == {"round": 9}


def test_lines_that_are_read_again_give_states_weights_and_reasons() -> None:
    found = history()
    assert found.clients == [0, 2, 5, 7]
    assert found.rounds == [1, 2, 3]
    assert [[STATES[state] for state in row] for row in found.states] == [
        ["kept", "skipped", "not invited"],
        ["rejected", "not invited", "kept"],
        ["filtered", "not invited", "kept"],
        ["no reply", "rejected", "not invited"],
    ]
    expected = [[0.25, np.nan, np.nan], [np.nan, np.nan, 0.333333], [0, np.nan, 0.75], [np.nan] * 3]
    np.testing.assert_array_equal(found.weights, expected)
    assert found.reasons == {(2, 1): "NaN", (7, 1): "late", (7, 2): "no\tdata"}


def test_a_round_that_was_done_again_counts_once() -> None:
    lines = [history_entry(r) for r in (*ROUNDS, report(2, invited=[5], accepted=[5]))]
    found = ClientHistory.of(lines)
    assert found.rounds == [1, 2, 3]
    assert [STATES[state] for state in found.states[:, 1]] == [
        "not invited", "not invited", "kept", "not invited"
    ]  # fmt: skip


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    assert read_history(tmp_path) is None
    lines = [json.dumps(history_entry(r)) for r in ROUNDS]
    (tmp_path / "clients.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])
    found = read_history(tmp_path)
    assert found is not None
    assert found.rounds == [1, 2]
    (tmp_path / "clients.jsonl").write_text(lines[0][:20])
    assert read_history(tmp_path) is None


# Through a run.


def test_rage_s_weights_and_whom_it_left_out_are_on_record(tmp_path: Path) -> None:
    reports: list[RoundReport] = []
    lies = {"attack": "reverse-scaled-average", "num_byzantine": 2, "num_corrupt": 2}
    run(tmp_path, [reports.append], algorithm="rage", num_clients=8, report=True, **lies)
    found = read_history(tmp_path)
    assert found is not None
    assert found.clients == list(range(8))
    assert found.rounds == [1, 2, 3]
    assert {STATES[s] for s in found.states[6:].ravel()} == {"filtered"}
    assert {STATES[s] for s in found.states[:6].ravel()} == {"kept"}
    for column, seen in enumerate(reports[1:]):
        assert seen.weights is not None
        np.testing.assert_allclose(found.weights[:, column], seen.weights.numpy(), rtol=1e-5)
    assert (found.weights[6:] == 0).all()
    assert (tmp_path / "plots" / "client-history.png").read_bytes().startswith(b"\x89PNG")
    assert "Who was filtered or rejected, and when" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("attack", "state"), [("nan", "rejected"), ("raise", "rejected"), ("slow", "no reply")]
)
def test_broken_replies_and_silence_have_states_of_their_own(
    tmp_path: Path, attack: str, state: str
) -> None:
    run(tmp_path, attack=attack, num_byzantine=1)
    found = read_history(tmp_path)
    assert found is not None
    assert {STATES[s] for s in found.states[3]} == {state}
    assert {STATES[s] for s in found.states[:3].ravel()} == {"kept"}
    assert len(found.reasons) == 3


def test_who_is_not_invited_has_no_state_in_that_round(tmp_path: Path) -> None:
    reports: list[RoundReport] = []
    run(tmp_path, [reports.append], participation="fixed", clients_per_round=2, report=True)
    found = read_history(tmp_path)
    assert found is not None
    for column, seen in enumerate(reports[1:]):
        kept = [c for c, s in zip(found.clients, found.states[:, column], strict=True) if s]
        assert kept == seen.invited
    # Nothing happened to anybody: there is nothing to see.
    assert not (tmp_path / "plots" / "client-history.png").exists()


def test_under_a_claim_the_operator_alone_knows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithm": "dp-fedavg", "clip_norm": 1.0, "noise_multiplier": 1.0}
    run(tmp_path, instruments=False, report=True, attack="nan", num_byzantine=1, **options)
    assert not (tmp_path / "clients.jsonl").exists()
    assert read_history(tmp_path) is None
    assert not (tmp_path / "plots" / "client-history.png").exists()
    lines = [json.loads(x) for x in (tmp_path / "operator.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        assert line["clients"] == {"kept": [0, 1, 2], "rejected": [3]}
        assert set(line["weights"]) == {"0", "1", "2"}
    assert '"weights"' not in (tmp_path / "metrics.jsonl").read_text()


# The heat map.


def test_shared_cells_show_what_is_worth_knowing() -> None:
    states = np.array([[0, 1, 4, 1, 0], [1, 1, 1, 1, 5], [3, 0, 0, 0, 2]], dtype=np.uint8)
    assert merged(states, 1, 1).tolist() == states.tolist()
    assert merged(states, 2, 1).tolist() == [[1, 1, 4, 1, 5], [3, 0, 0, 0, 2]]
    assert merged(states, 1, 2).tolist() == [[1, 4, 0], [1, 1, 5], [3, 0, 2]]
    assert merged(states, 3, 9).tolist() == [[5]]


@pytest.mark.parametrize(("clients", "rounds"), [(5, 4), (200, 25), (1000, 30), (5, 1200)])
def test_one_filtered_client_is_seen_in_a_large_run(
    clients: int, rounds: int, tmp_path: Path
) -> None:
    kept = [{"round": t, "clients": {"kept": list(range(clients))}} for t in range(1, rounds + 1)]
    assert plot_client_history(ClientHistory.of(kept), tmp_path / "nothing.png") is None
    worst = {"kept": list(range(clients - 1)), "filtered": [clients - 1]}
    kept[rounds // 2] = {"round": rounds // 2 + 1, "clients": worst}
    path = plot_client_history(ClientHistory.of(kept), tmp_path / "plots" / "h.png")
    assert path is not None
    picture = imread(path)[..., :3]
    assert picture.shape[0] <= 1300

    def pixels(state: str) -> int:
        return int((np.abs(picture - to_rgb(COLOURS[state])).max(axis=2) < 0.02).sum())

    # The legend's patch has the colour too: about 40 by 20 dots.
    assert pixels("filtered") > 480 + 4
    assert pixels("kept") > 50 * pixels("filtered") or clients * rounds < 100


def test_the_colours_differ_in_lightness() -> None:
    """Also for those who see no colours at all: by at least a twentieth of the scale."""
    lightness = sorted(float(np.dot(to_rgb(c), [0.2126, 0.7152, 0.0722])) for c in COLOURS.values())
    assert min(np.diff(lightness)) > 0.05
