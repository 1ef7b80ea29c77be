"""Whom a run's rounds convict: scores by client, what is said of them, and who is left out."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blackthorn.recording.client_history import read_entries
from blackthorn.settings.config import RunConfig
from blackthorn.settings.privacy_checks import claims_anything
from blackthorn.settings.robustness_checks import is_robust, rule_of
from blackthorn.strategies.participation import CohortPlan, Participation
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.suspicion import (
    FEWEST_CLIENTS,
    FEWEST_ROUNDS,
    LEVEL,
    p_values,
    round_scores,
)

_UNIDENTIFIED = (
    "nobody stands out from the others beyond what honest clients do by chance. That acquits "
    "nobody: where clients' data are unlike, one that lies may look like any other"
)


def keeps_scores(config: RunConfig) -> bool:
    """Whether the run's clients are scored: under a robust rule, where no claim forbids it."""
    robust = is_robust(config) or rule_of(config) != "mean"
    return robust and not claims_anything(config)


class SuspectWatch:
    """An observer that scores a round's clients, and remembers it.

    `entries`: the lines of clients.jsonl of a run that goes on. `quarantine_after`: after so many
    rounds those who are suspects then are left out of cohorts (0: nobody ever is); it is looked
    once, so that one probability holds for the run.
    """

    def __init__(
        self, entries: Iterable[Mapping[str, Any]] = (), quarantine_after: int = 0
    ) -> None:
        self.scores: dict[int, list[Sequence[float]]] = {}
        self._after = quarantine_after
        self.quarantined: frozenset[int] = frozenset()
        for entry in entries:
            self._add(entry["round"], entry.get("scores", {}))

    def __call__(self, report: RoundReport) -> None:
        """Put the scores of the round's clients into its report."""
        if report.updates is None or len(report.accepted) < 2:
            return
        try:
            table = round_scores(report.updates)
        except ValueError:  # updates that no rule takes either
            return
        # Four digits, for the sake of the file's size.
        rows = [[float(f"{value:.4g}") for value in row] for row in table]
        report.scores = dict(zip(report.accepted, rows, strict=True))
        self._add(report.server_round, report.scores)

    def entry(self) -> dict[str, Any]:
        """What the summary says: suspects and their p-values, from the smallest on."""
        return {**verdict(self.scores), "quarantined": sorted(self.quarantined)}

    def _add(self, server_round: int, scores: Mapping[Any, Sequence[float]]) -> None:
        for client, row in scores.items():
            self.scores.setdefault(int(client), []).append(row)
        if server_round == self._after:
            found = verdict(self.scores)["clients"]
            self.quarantined = frozenset(suspect["client"] for suspect in found)


class WithoutSuspects:
    """A participation that draws from those clients alone who are not in quarantine."""

    def __init__(self, inner: Participation, watch: SuspectWatch) -> None:
        self._inner, self._watch = inner, watch

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> CohortPlan:
        """The cohort, by the participation that stands behind it."""
        left = [client for client in clients if client not in self._watch.quarantined]
        return self._inner.sample(left, generator)


def verdict(scores: Mapping[int, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """The suspects among the clients, by their rounds' scores, and what there is to say."""
    found = p_values(scores)
    suspects = sorted((p, client) for client, p in found.items() if p <= LEVEL)
    said = ""
    if len(found) < FEWEST_CLIENTS:
        said = (
            f"nothing can be said: {len(found)} clients have counted in {FEWEST_ROUNDS} rounds or "
            f"more, and {FEWEST_CLIENTS} are needed"
        )
    elif 2 * len(suspects) >= len(found):
        said = "nothing can be said: half of the clients or more stand out from the others"
        suspects = []
    elif not suspects:
        said = f"nothing can be said: {_UNIDENTIFIED}"
    listed = [{"client": client, "p": float(f"{p:.3g}")} for p, client in suspects]
    return {"clients": listed, "said": said}


def suspects_of(folder: Path) -> dict[str, Any]:
    """The verdict over the rounds on record in a run's folder.

    Raises ValueError, one line, where the folder has no scores.
    """
    watch = SuspectWatch(read_entries(folder))
    if not watch.scores:
        raise ValueError(
            f"{folder} has no scores of clients: only runs under a robust rule that claim no "
            "privacy keep them, in clients.jsonl"
        )
    return verdict(watch.scores)
