"""What became of every client in every round: clients.jsonl, and reading it again.

One line a round: the clients by what became of them (`STATES`), the weights that the rule gave
those it was shown, and the reasons of those whose replies did not count. Under a privacy claim the
same is part of operator.jsonl, and of nothing that is released.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

# Who follows a run somewhere else need not wait for torch.
if TYPE_CHECKING:
    from blackthorn.strategies.reports import RoundReport

CLIENTS = "clients.jsonl"

# From the least to the most worth knowing: where several share a cell of a plot, the last counts.
# "surplus": enough others had answered. "skipped": the reply was sound, but the round left the
# model as it was.
STATES = ("not invited", "surplus", "kept", "skipped", "no reply", "filtered", "rejected")


def history_entry(report: "RoundReport") -> dict[str, Any]:
    """A round's line: "round", "clients" by state, "weights" and "reasons" by client id."""
    return {"round": report.server_round, **client_fields(report)}


def client_fields(report: "RoundReport") -> dict[str, Any]:
    """The same without the round. States that nobody is in are left out."""
    filtered = set(report.filtered)
    sound = "skipped" if report.skipped else "kept"
    states: dict[str, list[int]] = {state: [] for state in STATES[1:]}
    states["surplus"].extend(report.surplus)
    for client in report.accepted:
        states["filtered" if client in filtered else sound].append(client)
    for rejection in report.rejected:
        states["rejected" if rejection.replied else "no reply"].append(rejection.client)
    fields: dict[str, Any] = {
        "clients": {state: sorted(set(ids)) for state, ids in states.items() if ids},
        "weights": _weights(report),
        "reasons": {str(rejection.client): rejection.reason for rejection in report.rejected},
    }
    if report.scores:
        fields["scores"] = {str(client): row for client, row in report.scores.items()}
    return {key: value for key, value in fields.items() if value}


def _weights(report: "RoundReport") -> dict[str, float]:
    if report.weights is None:
        return {}
    # Six digits, for the sake of the file's size.
    pairs = zip(report.accepted, report.weights.tolist(), strict=True)
    return {str(client): float(f"{weight:.6g}") for client, weight in pairs}


@dataclass(frozen=True)
class ClientHistory:
    """All rounds of a run, one row a client and one column a round.

    Attributes:
        clients: ids of the clients that were ever invited, ascending [N].
        rounds: the rounds' numbers, ascending [T].
        states: uint8 [N, T], indices into STATES.
        weights: float64 [N, T], what the rule gave the client's update; NaN where it saw none.
            0 is an update that was left out.
        reasons: (client, round) -> why a reply did not count.
    """

    clients: list[int]
    rounds: list[int]
    states: np.ndarray
    weights: np.ndarray
    reasons: dict[tuple[int, int], str]

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]]) -> Self:
        """From the lines of clients.jsonl."""
        # A run that was resumed has done some rounds twice: the last time counts.
        entries = sorted({e["round"]: e for e in entries}.values(), key=lambda e: e["round"])
        rounds = [entry["round"] for entry in entries]
        clients = sorted({c for e in entries for ids in e.get("clients", {}).values() for c in ids})
        row = {client: i for i, client in enumerate(clients)}
        states = np.zeros((len(clients), len(rounds)), dtype=np.uint8)
        weights = np.full(states.shape, np.nan)
        reasons: dict[tuple[int, int], str] = {}
        for column, entry in enumerate(entries):
            for state, ids in entry.get("clients", {}).items():
                states[[row[client] for client in ids], column] = STATES.index(state)
            for client, weight in entry.get("weights", {}).items():
                weights[row[int(client)], column] = weight
            for client, reason in entry.get("reasons", {}).items():
                reasons[int(client), entry["round"]] = reason
        return cls(clients, rounds, states, weights, reasons)

    def is_eventful(self) -> bool:
        """Whether any invited client was not kept."""
        return bool((self.states > STATES.index("kept")).any())


def read_history(folder: Path) -> ClientHistory | None:
    """The history of a run; None where there is none that may be shown (a claim, no round)."""
    entries = read_entries(folder)
    return ClientHistory.of(entries) if entries else None


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's clients.jsonl, of rounds that were done twice the last; none where it
    has no such file."""
    return list({entry["round"]: entry for entry in read_lines(folder / CLIENTS)}.values())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file of rounds (one that is still being written, or was when the run
    was killed, is left out); none where it is not there."""
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines() if line]
