"""Posterior samples on disk: one file a sample, a bounded number of them, whole after any end.

    posterior/slot-00000.safetensors, slot-00001.safetensors, ...    model states; each says which
                                                                     round it is of
    posterior/store.json                                             how many were offered

Every file is written as a whole or not at all, and a sample replaces another by a rename: whatever
ends the process, each file there is a sample. Opening the folder again goes on where it stood.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.config import RunConfig
from blackthorn.strategies.durable_file import replace_file
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import Problem

FOLDER = "posterior"
_STATE = "store.json"


@dataclass(frozen=True)
class StoredSample:
    """θ as a state_dict, and the round after which it was the global model."""

    server_round: int
    state: dict[str, np.ndarray]


class PosteriorStore:
    """Keeps at most `capacity` of the samples it is offered: the "last", or a "reservoir".

    The reservoir is a uniform choice among all that were offered (Vitter's algorithm R), whose
    draws are a function of `seed` and the sample's number, so that a store that is opened again
    goes on as if it had never been closed.

    Raises ValueError for a capacity below 1, or a folder whose samples were kept by another rule.
    """

    def __init__(
        self, folder: Path, capacity: int, keep: Literal["last", "reservoir"], seed: int
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity} is not allowed: at least 1")
        if keep not in ("last", "reservoir"):
            raise ValueError(f"keep = {keep!r} is not allowed: last or reservoir")
        self.folder = folder
        self._rule: dict[str, Any] = {"keep": keep, "capacity": capacity, "seed": seed}
        self.offered = 0
        self._last_round = -1
        self._reopen()

    def offer(self, server_round: int, state: Mapping[str, np.ndarray], **about: str) -> bool:
        """Take in a sample, or let it pass; whether it was written.

        `about` is kept with it. A round that was offered before is let pass.
        """
        if server_round <= self._last_round:
            return False
        slot = self._slot(self.offered)
        if slot is not None:
            labels = {"round": str(server_round), "number": str(self.offered), **about}
            arrays = {name: np.asarray(value, order="C") for name, value in state.items()}
            replace_file(self.folder / _file_name(slot), save(arrays, metadata=labels))
        self.offered += 1
        self._last_round = server_round
        self._write_state()
        return slot is not None

    def _slot(self, number: int) -> int | None:
        capacity = self._rule["capacity"]
        if number < capacity:
            return number
        if self._rule["keep"] == "last":
            return int(number % capacity)
        drawn = generator_of(Stream.RESERVOIR, self._rule["seed"], number)
        slot = int(drawn.integers(number + 1))
        return slot if slot < capacity else None

    def _reopen(self) -> None:
        path = self.folder / _STATE
        if path.exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            for key, value in self._rule.items():
                if state[key] != value:
                    raise ValueError(
                        f"{self.folder} holds samples kept with {key} = {state[key]}: "
                        f"{value} is not allowed"
                    )
            self.offered, self._last_round = state["offered"], state["last_round"]
        # A sample may have been written just before the end, and not yet counted.
        for sample in _sample_files(self.folder):
            labels = _labels(sample)
            self.offered = max(self.offered, int(labels["number"]) + 1)
            self._last_round = max(self._last_round, int(labels["round"]))

    def _write_state(self) -> None:
        state = {**self._rule, "offered": self.offered, "last_round": self._last_round}
        replace_file(self.folder / _STATE, (json.dumps(state, indent=2) + "\n").encode())


class PosteriorRecorder:
    """The observer of a run that keeps samples in its folder: every `thinning`-th θ after
    `burn-in`.

    A round that left the model as it was adds no sample.
    """

    def __init__(self, config: RunConfig, problem: Problem, run: Path) -> None:
        self._burn_in, self._thinning = config.burn_in, config.thinning
        self._model = problem.model
        self._state = {name: value.numpy() for name, value in problem.state().items()}
        self.store = PosteriorStore(
            run / FOLDER, config.max_samples, config.keep_samples, config.seed
        )

    def __call__(self, report: RoundReport) -> None:
        """See a round."""
        past = report.server_round - self._burn_in
        if past < 1 or past % self._thinning or report.skipped:
            return
        views = self._model.unflatten(report.model)
        learned = {name: view.numpy() for name, view in views.items()}
        state = {**self._state, **learned, **report.statistics}
        # What `noisier_rounds` reads; a claim keeps it from whoever sees the models.
        cohort = {"invited": str(len(report.invited)), "replied": str(len(report.accepted))}
        self.store.offer(report.server_round, state, **({} if report.confidential else cohort))


def sample_rounds(run: Path) -> list[int]:
    """The rounds of a run's stored samples, ascending; empty where it has none."""
    return sorted(int(_labels(path)["round"]) for path in _sample_files(run / FOLDER))


def noisier_rounds(run: Path) -> list[int]:
    """The rounds of the stored samples for which not every client answered that was asked,
    ascending: the others, rescaled, carried more noise than a sample should have."""
    labels = [_labels(path) for path in _sample_files(run / FOLDER)]
    return sorted(int(one["round"]) for one in labels if one.get("invited") != one.get("replied"))


def read_samples(run: Path) -> Iterator[StoredSample]:
    """A run's stored samples one by one, by ascending round.

    Raises ValueError, one line, for a file that is not a sample.
    """
    by_round = {int(_labels(path)["round"]): path for path in _sample_files(run / FOLDER)}
    for server_round in sorted(by_round):
        with _opened(by_round[server_round]) as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        yield StoredSample(server_round, state)


def _file_name(slot: int) -> str:
    return f"slot-{slot:05d}.safetensors"


def _sample_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("slot-*.safetensors"))


def _labels(path: Path) -> dict[str, str]:
    with _opened(path) as file:
        labels = file.metadata() or {}
    if not {"round", "number"} <= labels.keys():
        raise ValueError(f"{path} is not a posterior sample: it does not say of which round")
    return dict(labels)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a posterior sample: {error}") from error
