"""`blackthorn pilot`: what a usual clipping threshold is, measured without privacy."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from blackthorn.launch.commands.recipes import recipe_config, recipe_file
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.settings.config import parse_setting, read_recipe
from blackthorn.strategies.bounding import row_norms
from blackthorn.strategies.reports import RoundReport

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
# FedAvg of honest clients: the recipe without whatever would shorten or falsify an update.
_UNCLIPPED = {
    "algorithm": "gfedavg",
    "algorithm-options": "",
    "aggregator": "mean",
    "clip-norm": 0.0,
    "attack": "none",
    "num-byzantine": 0,
    "noise-multiplier": 0.0,
    "epsilon": 0.0,
    "max-epsilon": 0.0,
    "ledger": "",
    "clip-quantile": 0.0,
    "instruments": True,
    # A pilot cannot be resumed: the norms of the rounds before would be missing.
    "state-every": 0,
}


class NothingMeasured(RunFailed):
    """The pilot run gave no usable norms; the message says why, in one line."""


class NormRecorder:
    """Observer that keeps the norms of all updates, in both units."""

    def __init__(self) -> None:
        self.gradient: list[float] = []
        self.parameter: list[float] = []

    def __call__(self, report: RoundReport) -> None:
        """Record ‖u_i‖ and ‖Δ_i‖ = η_l ‖u_i‖ of the round's clients."""
        if report.updates is None:
            return
        norms = row_norms(report.updates).tolist()
        self.gradient += norms
        self.parameter += [norm * report.local_lr for norm in norms]


def pilot(
    recipe: Path,
    settings: Sequence[str],
    output_dir: str | None,
    console: Console,
    people: Console | None = None,
) -> None:
    """Run the recipe as unclipped FedAvg and print c = 0.5 · mean ‖Δ_i‖ (Zhang et al.).

    The rounds are shown on `people`, by default the same console. Raises ConfigError before
    anything runs, NothingMeasured where no norm came out.
    """
    honest = {**_UNCLIPPED, "output-dir": output_dir}
    asked = {**read_recipe(recipe_file(recipe)), **dict(map(parse_setting, settings))}
    if asked.get("participation") == "rotating":
        # Clients take turns for the sake of noise.
        honest["participation"] = "full"
    config = recipe_config(recipe, settings, honest)
    norms = NormRecorder()
    summary = simulate(config, people or console, label="[pilot] ", observers=[norms])
    if not norms.gradient:
        raise NothingMeasured("no client's update was accepted in any round of the pilot run")
    if not all(map(math.isfinite, norms.gradient)):
        raise NothingMeasured("the pilot run diverged: its updates have no finite norm")
    text = pilot_report(recipe, norms, summary["catastrophic_failure"])
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def pilot_report(recipe: Path, norms: NormRecorder, failed_round: int | None = None) -> str:
    """The threshold and the quantiles in words; `failed_round` of a run that failed itself."""
    columns = [np.array(norms.parameter), np.array(norms.gradient)]
    c_parameter, c_gradient = (0.5 * column.mean() for column in columns)
    run = f"blackthorn simulate {recipe}"
    lines = [
        "",
        f"Norms of {len(norms.gradient)} updates (all clients, all rounds), unclipped FedAvg:",
        "",
        f"{'':24}{'parameter units':>18}{'gradient units':>18}",
        _row("c = 0.5 x mean", [c_parameter, c_gradient]),
        _row("mean", [column.mean() for column in columns]),
        *[_row(f"{q:.0%} quantile", [np.quantile(c, q) for c in columns]) for q in QUANTILES],
        "",
        "How to use it (the rule of Zhang et al.; a start, not an optimum):",
        f"  {run} --set algorithm=ce-fedavg --set clip-norm={c_parameter:.4g}",
        f"  {run} --set algorithm=fat-clipping-pr --set clip-norm={c_gradient:.4g}",
        "clip-norm counts in the algorithm's own unit unless clip-units says otherwise.",
        "",
        "This number is NOT private: it was read off every client's update, without noise. A run "
        "that",
        "claims differential privacy and uses it must say that its threshold came from the data:",
        "the key clip-norm-from-data = true makes its summary do so.",
    ]
    if failed_round is not None:
        lines += [
            "",
            f"The pilot run itself failed in round {failed_round} (accuracy lost, or a loss that",
            "is not finite): a few huge updates rule the mean, and the lower quantiles say more.",
        ]
    return "\n".join(lines)


def _row(name: str, values: Sequence[float]) -> str:
    return f"{name:24}" + "".join(f"{value:18.4g}" for value in values)
