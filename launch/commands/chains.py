"""`chains = 4`: several chains of one posterior in one run, and whether they agree.

Each is a run of its own in OUTPUT-DIR/chain-1, chain-2, ..., with cohorts, batches, noise and a
first model of its own; they are run one after the other. The folder above has `chains.json`: what
they say together.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from blackthorn.launch.commands.diagnose import diagnose_runs
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.folder_place import choose_folder
from blackthorn.recording.run_folder import read_summary
from blackthorn.recording.state_files import read_saved
from blackthorn.reporting.posterior_report import mixing, number_or_none, worst
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.strategies.durable_file import replace_file

CHAINS = "chains.json"


def chain_folder(folder: Path, number: int) -> Path:
    """Where chain `number`, from 1, of a run in `folder` is."""
    return folder / f"chain-{number}"


def simulate_chains(config: RunConfig, console: Console) -> dict[str, Any]:
    """Run `config`'s chains, or go on with those in the folder `resume`, and return the last one's
    summary with "posterior" of them all.

    A chain that is completed stays as it is, one that was cut off goes on from its last state.
    Raises ConfigError as `simulate`.
    """
    folder = choose_folder(config)
    summaries = [_one(config, folder, number, console) for number in range(1, config.chains + 1)]
    runs = [chain_folder(folder, number) for number in range(1, config.chains + 1)]
    found = diagnose_runs(runs, console)
    together: dict[str, Any] = {
        "samples": sum(one["posterior"]["samples"] for one in summaries),
        "chains": config.chains,
        **worst(found),
        "mixing": mixing(found, config.chains),
    }
    rows = [{key: number_or_none(value) for key, value in asdict(one).items()} for one in found]
    text = json.dumps({**together, "scalars": rows}, indent=2) + "\n"
    replace_file(folder / CHAINS, text.encode())
    return {**summaries[-1], "posterior": together}


def _one(config: RunConfig, folder: Path, number: int, console: Console) -> dict[str, Any]:
    place = chain_folder(folder, number)
    if config.resume:
        summary = read_summary(place)
        if summary is not None and summary["status"] == "completed":
            return summary
    goes_on = bool(config.resume) and place.exists() and read_saved(place) is not None
    if config.resume and not goes_on and place.exists():
        raise ConfigError(
            f"resume = {config.resume} is not allowed: {place.name} has no whole state to go on "
            f"from; remove {place}, and it begins anew"
        )
    own: dict[str, Any] = {
        "chains": 1,
        "chain": number,
        "initial_point": starts(config.initial_point, config.chains)[number - 1],
        "output_dir": "" if goes_on else str(place),
        "resume": str(place) if goes_on else "",
    }
    if config.langevin_seed >= 0:
        own["langevin_seed"] = (config.langevin_seed + number - 1) % 2**32
    return simulate(config.model_copy(update=own), console, label=f"[chain {number}] ")


def starts(first: float, chains: int) -> Sequence[float]:
    """`initial-point` of each chain: on both sides of the first one's, ever further away."""
    width = abs(first) or 1.0
    return [first + width * (-1) ** k * ((k + 1) // 2) for k in range(chains)]
