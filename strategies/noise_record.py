"""Noise of rounds that hang together (banded matrix factorisation, arXiv 2306.08153, 2405.13763),
and its record on disk.

Where clients take turns in b groups, a client's contributions are b rounds apart. The noise of a
round may then take back some of that of the b − 1 rounds before, so that it all but cancels in the
sum of all rounds, which is where the model goes: no client is in two of the rounds that it joins.
"""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .durable_file import private_folder, replace_file
from .ledger_file import charge_entry, read_charge
from .release import Release

# Names of the state's values.
_NOISES, _ROUNDS = "noises", "noised_rounds"


def band_coefficients(bands: int) -> np.ndarray:
    """c_0..c_{b−1} [b], float64: of (1 − x)^(−1/2), c_j ∝ binom(2j, j)/4^j, with Σ c_j² = 1.

    They are a column of the lower triangular Toeplitz matrix C. A client of rounds s, s + b, …
    moves C times the updates by columns that do not overlap: by √k clip-norms for k rounds, and k
    compositions of the Gaussian are what they cost.
    """
    steps = np.arange(1, bands)
    series = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
    return series / np.sqrt(np.square(series).sum())


def summed_deviations(bands: int, rounds: int) -> np.ndarray:
    """Standard deviations [T], float64, of the sums Σ_{s ≤ t} ẑ_s in units of that of one z_t:
    √t with one band, from the partial sums of 1/C(x) with more."""
    return np.sqrt(np.cumsum(np.square(np.cumsum(_response(bands, rounds)))))


def round_deviations(bands: int, rounds: int) -> np.ndarray:
    """Standard deviations [T], float64, of ẑ_t alone in units of that of z_t: 1 with one band."""
    return np.sqrt(np.cumsum(np.square(_response(bands, rounds))))


# A step of Python each: once a run, not once a round.
@lru_cache(maxsize=8)
def _response(bands: int, rounds: int) -> np.ndarray:
    """The coefficients of 1/C(x) [T]: what of z_1 is in ẑ_1, ẑ_2, …"""
    coefficients = band_coefficients(bands)
    response = np.zeros(rounds)
    # With one band nothing is taken back.
    for t in range(rounds if bands > 1 else 1):
        before = coefficients[1 : t + 1]
        response[t] = (t == 0) - before @ response[t - len(before) : t][::-1]
        response[t] /= coefficients[0]
    response.setflags(write=False)
    return response


@dataclass(frozen=True)
class Recorded:
    """What a round released [d], and as what it is charged; None: an earlier version kept it."""

    vector: np.ndarray
    release: Release | None


@dataclass
class NoiseRecord:
    """The noises ẑ_t of the last b − 1 rounds, and what the rounds released that a state may not
    know yet.

    ẑ_t = (z_t − Σ_{1 ≤ j < b} c_j ẑ_{t−j})/c_0, float64 [d], z_t standard normal: in units of the
    deviation z C of a round, whose own it is multiplied by. With a `folder`, for its owner alone,
    noise and release are on disk before anybody sees the release: a round that is done again after
    a crash is the same release, since with another sum the same noise would tell the sums'
    difference, and another noise would be another release, which the charge does not count. What
    it is charged as lies there, too: who does it again may have another plan.
    `run`: the ledger's name of the run, which its files bear (None: whoever's they are).
    """

    bands: int
    folder: Path | None = field(default=None, compare=False)
    run: str | None = field(default=None, compare=False)
    _noises: dict[int, np.ndarray] = field(default_factory=dict, init=False)
    _released: tuple[int, Recorded] | None = field(default=None, init=False)
    # Up to which rounds the last two states go, of which a crash leaves one.
    _states: tuple[int, int] = field(default=(0, 0), init=False)

    def begin(self, run: str) -> None:
        """The record is that run's. Raises ValueError, one line, where the folder has another's, or
        a file that is damaged."""
        self.run = run
        if self.folder is not None:
            for path in sorted(self.folder.glob("noise-*.npz")):
                self._read(path)

    def noise(self, server_round: int, fresh: np.ndarray) -> np.ndarray:
        """ẑ_t of the round, from z_t = `fresh` [d]."""
        found, coefficients = fresh.copy(), band_coefficients(self.bands)
        for back, coefficient in enumerate(coefficients[1:], start=1):
            before = self._noises.get(server_round - back)
            if before is not None:
                found -= coefficient * before
        found /= coefficients[0]
        self._remember(server_round, found)
        return found

    def keep(self, server_round: int, recorded: Recorded) -> None:
        """The round's noise and what it releases, on disk when this returns."""
        self._released = (server_round, recorded)
        if self.folder is None:
            return
        content = io.BytesIO()
        noise, run = self._noises[server_round], np.array(self.run or "")
        assert recorded.release is not None
        charge = np.array(json.dumps(charge_entry((recorded.release, 1))))
        np.savez(content, noise=noise, released=recorded.vector, run=run, charge=charge)
        private_folder(self.folder)
        replace_file(noise_file(self.folder, server_round), content.getvalue(), private=True)

    def released(self, server_round: int) -> Recorded | None:
        """What the round released, or was about to when the server died; None: it is new.

        Raises ValueError for a file that is damaged, or another run's.
        """
        if self._released is not None and self._released[0] == server_round:
            return self._released[1]
        if self.folder is None or not self.holds(server_round):
            return None
        noise, recorded = self._read(noise_file(self.folder, server_round))
        self._remember(server_round, noise)
        self._released = (server_round, recorded)
        return recorded

    def holds(self, server_round: int) -> bool:
        """Whether what the round released is known."""
        if self._released is not None and self._released[0] == server_round:
            return True
        return self.folder is not None and noise_file(self.folder, server_round).exists()

    def _read(self, path: Path) -> tuple[np.ndarray, Recorded]:
        try:
            with np.load(path, allow_pickle=False) as held:
                noise, vector, run = held["noise"], held["released"], str(held["run"])
                charge = json.loads(str(held["charge"])) if "charge" in held else None
            release = None if charge is None else read_charge(charge)[0]
        except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if self.run not in (None, run):
            raise ValueError(
                f"noises = {path.parent} is not allowed: {path.name} is another run's: name a "
                "folder of its own for every run, or go on from_state of that one"
            )
        return noise, Recorded(vector, release)

    def values(self, server_round: int) -> dict[str, Any]:
        """For the state after a round: the noises that later ones take back, oldest first."""
        if self.folder is not None and server_round > self._states[1]:
            for path in self.folder.glob("noise-*.npz"):
                if int(path.stem.removeprefix("noise-")) <= self._states[0]:
                    path.unlink(missing_ok=True)
            self._states = (self._states[1], server_round)
        held = sorted(self._noises) if self.bands > 1 else []
        noises = {_NOISES: np.stack([self._noises[t] for t in held])} if held else {}
        return {**noises, _ROUNDS: held}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from `values`."""
        if values.get(_ROUNDS):
            pairs = zip(values[_ROUNDS], values[_NOISES], strict=True)
            self._noises = {int(server_round): np.array(noise) for server_round, noise in pairs}
            self._states = (0, max(self._noises))

    def _remember(self, server_round: int, noise: np.ndarray) -> None:
        self._noises[server_round] = noise
        oldest = server_round - max(1, self.bands - 1)
        self._noises = {t: held for t, held in self._noises.items() if t > oldest}


def noise_file(folder: Path, server_round: int) -> Path:
    """Of a round."""
    return folder / f"noise-{server_round:05d}.npz"
