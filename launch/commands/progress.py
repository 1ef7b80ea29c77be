"""What a person wants to know while a run is under way: a bar in a terminal, else lines."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blackthorn.recording.round_entries import metrics_of
from blackthorn.settings.rounding import upward

# Metrics of one's own that a line has room for.
_MOST_NAMED = 2


def round_line(entry: Mapping[str, Any], num_rounds: int) -> str:
    """Progress line of one metrics.jsonl entry, with a line for everything that went wrong."""
    parts = [f"round {entry['round']:>{len(str(num_rounds))}}/{num_rounds}"]
    parts += quality(entry)
    if entry.get("unevaluated"):
        parts.append("not evaluated")
    if entry.get("invited"):
        parts.append(f"replies {entry['replied']}/{entry['invited']}")
    if entry.get("filtered"):
        parts.append(f"filtered {len(entry['filtered'])}")
    if entry.get("seconds"):
        parts.append(f"{sum(entry['seconds'].values()):.1f} s")
    return "\n".join(["  ".join(parts), *incidents(entry)])


def quality(entry: Mapping[str, Any]) -> list[str]:
    """Accuracy, loss and epsilon, as far as the entry has them."""
    parts = []
    if entry.get("accuracy") is not None:
        parts.append(_percent(entry["accuracy"]))
    if entry.get("loss") is not None:
        loss = entry["loss"]
        parts.append(f"loss {loss:.4f}" if loss < 1e6 else f"loss {loss:.3g}")
    parts += _others(metrics_of(entry))
    if entry.get("epsilon_rdp") is not None:
        parts.append(f"epsilon {upward(entry['epsilon_rdp'])}")
    return parts


def _percent(accuracy: float) -> str:
    return f"accuracy {100 * accuracy:5.1f} %" if isfinite(accuracy) else f"accuracy {accuracy}"


def reached(final: Mapping[str, float]) -> str:
    """How good a run's last model is: its accuracy, or else what metrics it has of its own."""
    accuracy = final.get("accuracy")
    parts = [f"accuracy {100 * accuracy:.1f} %"] if accuracy is not None else _others(final)
    return "".join(f", {part}" for part in parts)


def _others(metrics: Mapping[str, float]) -> list[str]:
    names = [name for name in metrics if name not in ("accuracy", "loss")]
    return [f"{name} {metrics[name]:.4g}" for name in names[:_MOST_NAMED]]


def incidents(entry: Mapping[str, Any]) -> list[str]:
    """A line for each rejected client, and for a round that left the model as it was."""
    lines = [f"  client {r['client']} rejected: {r['reason']}" for r in entry.get("rejected", [])]
    for refused in entry.get("refused", []):
        barred = "; it is barred" if refused["barred"] else ""
        often = "once" if refused["count"] == 1 else f"{refused['count']} times"
        lines.append(f"  {refused['key']}: refused {often}: {refused['what']}{barred}")
    lines += [f"  warning: {told}" for told in entry.get("warnings", [])]
    if entry.get("skipped"):
        lines.append(f"  the model stays as it was: {entry['skipped']}")
    return lines


def time_left(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def taken(summary: Mapping[str, Any]) -> str:
    """How long a run took, where its summary says so (under a privacy claim it does not)."""
    seconds = summary["wall_seconds"]
    return "" if seconds is None else f" in {seconds:.1f} s"


class RoundPrinter:
    """Tracker that shows the rounds; inside a `with` block of a terminal as a bar, else as lines.

    Whatever the console, what went wrong in a round stays on the screen. `timed`: with an estimate
    of the time that is left, from which one could tell how long every round took.
    """

    def __init__(
        self, console: Console, num_rounds: int, label: str = "", *, timed: bool = True
    ) -> None:
        self._console = console
        self._num_rounds = num_rounds
        self._label = label
        self._timed = timed
        self._began = time.monotonic()
        self._bar: _Bar | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._bar = _Bar(self._console, self._num_rounds, self._label, self._timed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def round(self, entry: Mapping[str, Any]) -> None:
        """Show a line of metrics.jsonl, in which there is nothing that a privacy claim covers."""
        if self._bar is not None:
            self._bar.show(entry)
            lines = incidents(entry)
        else:
            lines = [self._label + round_line(entry, self._num_rounds) + self._left(entry["round"])]
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """How the run ended is told elsewhere."""

    def _left(self, done: int) -> str:
        if not self._timed or not 0 < done < self._num_rounds:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self._num_rounds - done)
        return f"  left {time_left(seconds)}" if seconds >= 1 else ""


class _Bar:
    def __init__(self, console: Console, num_rounds: int, label: str, timed: bool) -> None:
        left = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
        self._num_rounds = num_rounds
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            TextColumn("{task.fields[clients]}", markup=False),
            *([left] if timed else []),
            console=console,
        )
        self._task = self._progress.add_task(f"{label}round", total=num_rounds, said="", clients="")
        self._said: dict[str, Any] = {}
        self._progress.start()

    def show(self, entry: Mapping[str, Any]) -> None:
        # A round without an evaluation leaves the last one's figures where they are.
        known = ("accuracy", "loss", "epsilon_rdp", "evaluated_by", *metrics_of(entry))
        self._said |= {key: entry[key] for key in known if entry.get(key) is not None}
        clients = f"clients {entry['replied']}/{entry['invited']}" if entry.get("invited") else ""
        said = "  ".join(quality(self._said))
        self._progress.update(self._task, completed=entry["round"], said=said, clients=clients)

    def stop(self) -> None:
        self._progress.stop()


@contextmanager
def step_progress(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with steps done and steps in all; a bar in a terminal, else ten lines."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        left = TimeRemainingColumn(compact=True)
        with Progress(*columns, left, console=console, transient=True) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return
    began, tenths = time.monotonic(), 0

    def advance(done: int, total: int) -> None:
        nonlocal tenths
        if done and 10 * done // total > tenths:
            tenths = 10 * done // total
            seconds = (time.monotonic() - began) / done * (total - done)
            text = f"{what} {done}/{total}  left {time_left(seconds)}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    yield advance
