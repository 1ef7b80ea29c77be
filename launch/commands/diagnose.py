"""`blackthorn diagnose`: whether chains of posterior samples have mixed, and agree."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from blackthorn.launch.commands.posterior_lines import diagnosis_table
from blackthorn.recording.folder_place import PLOTS
from blackthorn.reporting.posterior_diagnostics import Diagnosis, collect_traces, diagnose
from blackthorn.reporting.posterior_plots import plot_autocorrelation, plot_traces
from blackthorn.reporting.prediction import load_run
from blackthorn.settings.config import ConfigError, to_mapping
from blackthorn.settings.key_facts import free_between_chains


def diagnose_runs(runs: Sequence[Path], console: Console) -> list[Diagnosis]:
    """Effective sample size and split-R̂ over the samples of several runs, one chain each.

    The plots go to the first run's folder. Raises ConfigError with one line, also where the runs
    sample different posteriors, or one run is named twice.
    """
    for number, run in enumerate(runs):
        if run.resolve() in [other.resolve() for other in runs[:number]]:
            raise ConfigError(f"{run} is named twice: a chain counts once")
    config, problem = load_run(runs[0])
    for run in runs[1:]:
        other, _ = load_run(run)
        values, free = to_mapping(other), free_between_chains()
        for key, value in to_mapping(config).items():
            if key not in free and values[key] != value:
                raise ConfigError(
                    f"{run} is another posterior's chain than {runs[0]}: {key} = {values[key]}, "
                    f"not {value}"
                )
    try:
        traces = collect_traces(runs, problem)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    found = diagnose(traces)
    chains, draws = traces.values.shape[:2]
    lines = [
        f"{chains} chains of {draws} samples",
        "",
        *diagnosis_table([asdict(d) for d in found]),
    ]
    if draws > 1:
        plots = runs[0] / PLOTS
        try:
            lines += ["", str(plot_traces(traces, plots / "trace.png"))]
            lines.append(str(plot_autocorrelation(traces, plots / "autocorrelation.png")))
        except OSError as error:
            raise ConfigError(f"{plots} cannot be written: {error.strerror}") from error
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return found
