"""`blackthorn diagnose`: whether chains of posterior samples have mixed, and agree."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from blackthorn.launch.commands.posterior_lines import diagnosis_table
from blackthorn.reporting.posterior_diagnostics import Diagnosis, collect_traces, diagnose
from blackthorn.reporting.posterior_plots import plot_autocorrelation, plot_traces
from blackthorn.reporting.prediction import load_run
from blackthorn.settings.config import ConfigError

# What may differ between chains of one posterior.
_OF_THE_CHAIN = (
    *("output_dir", "langevin_seed", "num_server_rounds", "burn_in", "max_samples"),
    *("initial_point", "data_dir", "evaluate_every", "instruments", "checkpoint_every", "report"),
    *("tensorboard", "mlflow_uri", "round_timeout", "start_timeout"),
)


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
        for key in type(config).model_fields:
            if key not in _OF_THE_CHAIN and getattr(other, key) != getattr(config, key):
                raise ConfigError(
                    f"{run} is another posterior's chain than {runs[0]}: "
                    f"{key.replace('_', '-')} = {getattr(other, key)}, not {getattr(config, key)}"
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
        plots = runs[0] / "plots"
        try:
            lines += ["", str(plot_traces(traces, plots / "trace.png"))]
            lines.append(str(plot_autocorrelation(traces, plots / "autocorrelation.png")))
        except OSError as error:
            raise ConfigError(f"{plots} cannot be written: {error.strerror}") from error
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return found
