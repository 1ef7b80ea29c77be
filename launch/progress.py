"""One line a round: what a person wants to know while a run is under way."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from server_app.run_folder import round_entry
from strategies.reports import RoundReport


def round_line(entry: Mapping[str, Any], num_rounds: int) -> str:
    """Progress line of one metrics.jsonl entry."""
    parts = [f"round {entry['round']:>{len(str(num_rounds))}}/{num_rounds}"]
    if entry.get("accuracy") is not None:
        parts.append(f"accuracy {100 * entry['accuracy']:5.1f} %")
    if entry.get("loss") is not None:
        parts.append(f"loss {entry['loss']:.4f}")
    if entry.get("invited"):
        parts.append(f"replies {entry['replied']}/{entry['invited']}")
    if entry.get("filtered"):
        parts.append(f"filtered {len(entry['filtered'])}")
    if entry.get("seconds"):
        parts.append(f"{sum(entry['seconds'].values()):.1f} s")
    lines = ["  ".join(parts)]
    lines += [f"  client {r['client']} rejected: {r['reason']}" for r in entry.get("rejected", [])]
    if entry.get("skipped"):
        lines.append(f"  the model stays as it was: {entry['skipped']}")
    return "\n".join(lines)


class RoundPrinter:
    """Observer that prints a line a round."""

    def __init__(self, console: Console, num_rounds: int, label: str = "") -> None:
        self._console = console
        self._num_rounds = num_rounds
        self._label = label

    def __call__(self, report: RoundReport) -> None:
        """Print the round."""
        self.show(round_entry(report))

    def show(self, entry: Mapping[str, Any]) -> None:
        """Print a metrics.jsonl entry."""
        text = self._label + round_line(entry, self._num_rounds)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
