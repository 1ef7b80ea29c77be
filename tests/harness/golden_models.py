"""Short runs whose final models a change of the code must keep: every recipe, every algorithm.

`python tests/harness/golden_models.py` records them anew in golden_models.json: the models have
changed then, which is a commit alone, with its reason in CHANGELOG.md.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate

HARNESS = Path(__file__).resolve().parent
RECORD = HARNESS / "golden_models.json"
RECIPES = HARNESS.parents[1] / "recipes"
_DIRECTIONS = 6
_SHORT = {"num-server-rounds": 3, "evaluate-every": 3, "langevin-seed": 3}
_PLAIN = {"report": False, "tensorboard": False}
# A claim's noise has no seed; what is computed from it is the same with the noise of a test.
_SEEDED = {"insecure-seeded-noise": True, "claim-privacy": False, "epsilon": 0.0}
_FEW = {"num-clients": 24, "num-byzantine": 3}

WITHOUT_DATA = {
    *("own-data", "shakespeare", "dp-cifar10-features", "fat-clipping-cifar10"),
    *("understanding-clipping-cifar10", "understanding-clipping-emnist"),
}
# By recipe: what makes it short.
OF_RECIPES: dict[str, dict[str, Any]] = {
    "demo": {},
    "dp-digits": {**_SEEDED, "noise-multiplier": 0.5},
    "dp-fashion": {**_SEEDED, "noise-multiplier": 0.5, "num-clients": 60},
    "dp-turns": {**_SEEDED, "noise-multiplier": 0.5, "num-clients": 40},
    "fa-ld-bayes-linear": {"burn-in": 1, "num-server-rounds": 20, "evaluate-every": 10},
    "fa-ld-fashion-mnist": {"burn-in": 1, "local-steps": 5},
    "sghmc-bayes-linear": {"burn-in": 1, "num-server-rounds": 5},
    "fsgld-bayes-linear": {"burn-in": 1, "num-server-rounds": 9, "evaluate-every": 3},
    "fat-clipping-cauchy": {},
    "rage-mnist": _FEW,
    "robust-unlike": {},
    "understanding-clipping-claim-2.1": {},
    "understanding-clipping-mnist": {"num-clients": 24, "clients-per-round": 8},
    "understanding-clipping-table-4": {},
}
_DP = {**_SEEDED, "noise-multiplier": 0.8, "clip-norm": 0.5}
_LIARS = {"num-byzantine": 4, "attack": "baruch", "num-corrupt": 4, "corrupt-fraction": 0.0}
# On the demo's digits: what no recipe has.
OF_DIGITS: dict[str, dict[str, Any]] = {
    "gfedavg-momentum": {"algorithm": "gfedavg", "server-momentum": 0.9, "weight-decay": 0.01},
    "fat-clipping-pr": {"algorithm": "fat-clipping-pr", "clip-norm": 0.5},
    "fat-clipping-pi": {"algorithm": "fat-clipping-pi", "clip-norm": 0.5},
    "biclip": {
        "algorithm": "biclip",
        "algorithm-options": "low = 1e-4, high = 0.02, server-low = 1e-5, server-high = 0.01",
    },
    "error-feedback": {"algorithm": "error-feedback", "clip-norm": 0.5},
    "dp-fedavg-clients-noise": {"algorithm": "dp-fedavg", **_DP, "noise-location": "client"},
    "secure-dp-fedavg": {"algorithm": "secure-dp-fedavg", **_DP},
    "ce-fedavg-private": {"algorithm": "ce-fedavg", **_DP},
    "dp-normfedavg-cohort": {
        "algorithm": "dp-normfedavg",
        **_DP,
        "participation": "fixed",
        "clients-per-round": 9,
    },
    "fa-ld-scheme-1": {
        **{"algorithm": "fa-ld", "participation": "with-replacement", "clients-per-round": 5},
        **{"local-lr": 1e-4, "shared-noise": 0.3, "burn-in": 1},
    },
    "psgld": {
        **{"algorithm": "psgld", "participation": "with-replacement", "clients-per-round": 5},
        **{"local-lr": 1e-5, "burn-in": 2, "algorithm-options": "warm-up = 2"},
    },
    "fa-ld-cyclical": {
        **{"algorithm": "fa-ld", "step-size": "cyclical", "cycle-rounds": 3, "thinning": 3},
        **{"local-lr": 1e-4, "num-server-rounds": 6},
    },
    "fsgld-diagonal": {
        **{"algorithm": "fsgld", "participation": "with-replacement", "clients-per-round": 5},
        **{"local-lr": 1e-5, "burn-in": 1, "num-server-rounds": 4},
    },
    **{
        f"rage-{rule}": {"aggregator": rule, **_LIARS}
        for rule in ("trimmed-mean", "median", "multi-krum", "bulyan", "geometric-median")
    },
    "centered-clipping-nnm": {
        "aggregator": "centered-clipping",
        "pre-aggregator": "nearest-neighbour-mixing",
        **_LIARS,
    },
}


def final_model(case: str, folder: Path, data_dir: str | None) -> np.ndarray:
    """The parameters of the case's last model, float64 [d], by name."""
    recipe = case if case in OF_RECIPES else "demo"
    options = {**_SHORT, **OF_RECIPES[case]} if case in OF_RECIPES else None
    if options is None:
        options = {**_SHORT, "num-byzantine": 0, "attack": "none", **OF_DIGITS[case]}
    options |= {**_PLAIN, "output-dir": str(folder), "seed": 3}
    if data_dir:
        options["data-dir"] = data_dir
    simulate(recipe_config(RECIPES / f"{recipe}.toml", (), options), Console(quiet=True))
    state = load_file(folder / "checkpoints" / "final.safetensors")
    return np.concatenate([state[name].reshape(-1).astype(np.float64) for name in sorted(state)])


def fingerprint(model: np.ndarray) -> list[float]:
    """Its norm, and its products with random directions of the length 1."""
    directions = np.random.default_rng(0).standard_normal((_DIRECTIONS, model.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return [float(np.linalg.norm(model)), *(float(x) for x in directions @ model)]


def needs_data(case: str) -> bool:
    """Whether the case is on MNIST or Fashion-MNIST."""
    return any(name in case for name in ("mnist", "fashion"))


def record(cases: Sequence[str]) -> None:
    """Write the cases' models into RECORD, and print each one's digest, which tells bit for bit on
    one machine."""
    data_dir = os.environ.get("BLACKTHORN_DATA_DIR", "")
    found = json.loads(RECORD.read_text())
    for case in cases:
        with TemporaryDirectory() as folder:
            model = final_model(case, Path(folder) / "run", data_dir)
        found[case] = fingerprint(model)
        print(case, hashlib.sha256(model.tobytes()).hexdigest()[:16], flush=True)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    all_cases = [*OF_RECIPES, *OF_DIGITS]
    named = sys.argv[1:] or all_cases
    unknown = [case for case in named if case not in all_cases]
    if unknown:
        sys.exit(f"{unknown[0]} is not a case: {', '.join(all_cases)}")
    record(named)
