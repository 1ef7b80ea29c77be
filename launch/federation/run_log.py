"""What a run's output says: its lines for operators (`recording/operator_log.py`), taken apart."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from blackthorn.recording.operator_log import PREFIX
from blackthorn.settings.rounding import upward

_REFUSED = re.compile(r"(?:(client \d+) on )?(node \d+) did not enrol: ")
# Ours from the first character on: what a client writes stands behind other words.
_WAITS = re.compile(
    r"(waiting for \d+ clients|nobody is connected|\d+ clients are connected: |"
    r"\d+ of \d+ clients connected within ).*"
)
_HELD = re.compile(r"client (\d+) is held by node (\d+)$")


def privacy_said(summary: Mapping[str, Any]) -> str:
    """What a summary's figures of privacy say in a line; empty where it has none."""
    privacy = summary.get("privacy") or {}
    epsilon = privacy.get("epsilon")
    said = f", epsilon {upward(epsilon)}" if epsilon is not None else ""
    if epsilon is not None and not privacy.get("covers_clients", True):
        said += " (not against the run's own clients, at least: see its claim)"
    of_example = (summary.get("sample_privacy") or {}).get("epsilon")
    return said + (
        f", epsilon of an example {upward(of_example)}" if of_example is not None else ""
    )


@dataclass
class RunLog:
    """What is known of a run from its output so far. Feed it with `read`."""

    folder: str = ""
    rounds: int = 0
    last_round: int = 0
    longest_seconds: float | None = None
    resumable: bool = False
    summary: dict[str, Any] | None = None
    spent: dict[str, Any] | None = None
    failure: str | None = None
    misconfigured: bool = False
    nodes: dict[int, int] = field(default_factory=dict)
    rejections: dict[int, int] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    _told_to: dict[str, int] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)
    _news: list[str] = field(default_factory=list)
    _rest: str = ""

    def read(self, text: str) -> Iterator[dict[str, Any]]:
        """Take in more output; yields the rounds that it completes, and nothing of them that a
        claim leaves to the operator."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            before, prefix, content = line.partition(PREFIX)
            # What follows is a client's own text, which must not pass for the server's.
            if refused := _REFUSED.search(before):
                self._refuse(refused.group(1) or refused.group(2), line[refused.end() :])
            elif prefix:
                yield from self._told(content)
            elif waits := _WAITS.match(line):
                self._news.append(waits.group())
            elif held := _HELD.search(line):
                self.nodes[int(held.group(1))] = int(held.group(2))

    def news(self) -> list[str]:
        """What there is to know before the run starts, whom it waits for, who could not enrol and
        why, a line each; what was told before only if it changed."""
        news, self._news = self._news, []
        return news

    def _refuse(self, who: str, reason: str) -> None:
        if self.refusals.get(who) != reason:
            self.refusals[who] = reason
            self._news.append(f"{who}: {reason}")

    def _told(self, content: str) -> Iterator[dict[str, Any]]:
        try:
            ((kind, value),) = json.loads(content).items()
        except (ValueError, AttributeError):
            return
        if kind == "run":
            self.folder, self.rounds = value["folder"], value["rounds"]
            self.longest_seconds = value["longest-seconds"]
            self.resumable = value.get("resumable", False)
        elif kind == "notes":
            self._news += [note for note in value if note not in self._noted]
            self._noted.update(value)
        elif kind == "summary":
            self.summary = value
        elif kind == "spent":
            self.spent = value
        elif kind == "failed":
            self.failure, self.misconfigured = value["reason"], value["configuration"]
        elif kind in ("round", "operator"):
            # A ServerApp that goes on tells the rounds again: their lines may have been lost.
            if value["round"] <= self._told_to.get(kind, -1):
                return
            self._told_to[kind] = value["round"]
            for rejection in value.get("rejected", ()):
                client = rejection["client"]
                self.rejections[client] = self.rejections.get(client, 0) + 1
            if kind == "round":
                self.last_round = value["round"]
                yield value
