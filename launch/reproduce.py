"""`blackthorn reproduce`: the papers' figures measured anew, beside what they should be."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments import (
    dp_normfedavg,
    fa_ld,
    fat_clipping,
    stationary_points,
    understanding_clipping,
)
from experiments.finding import Finding
from server_app.config import ConfigError

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """What the command line chooses: `seeds` None is the experiment's own number."""

    seeds: int | None = None
    data_dir: str = ""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper; `run` measures it, and calls its second argument as it goes."""

    about: str
    run: Callable[[Options, Advance], list[Finding]]


def _cauchy(options: Options, advance: Advance) -> list[Finding]:
    return fat_clipping.cauchy_findings(
        fat_clipping.cauchy(options.seeds or 100, advance=advance),
    )


def _mnist(options: Options, advance: Advance) -> list[Finding]:
    figures = understanding_clipping.mnist(options.data_dir, advance=advance)
    return understanding_clipping.mnist_findings(figures)


def _fashion(options: Options, advance: Advance) -> list[Finding]:
    return dp_normfedavg.fashion_findings(
        dp_normfedavg.fashion_mnist(options.data_dir, options.seeds or 3, advance=advance)
    )


def _quadratic(options: Options, advance: Advance) -> list[Finding]:
    return dp_normfedavg.quadratic_findings(
        dp_normfedavg.quadratic(options.seeds or 3, advance=advance)
    )


def _bayes_linear(_options: Options, advance: Advance) -> list[Finding]:
    return fa_ld.bayes_linear_findings(fa_ld.bayes_linear(advance=advance))


def _fashion_mnist(options: Options, advance: Advance) -> list[Finding]:
    figures = fa_ld.fashion_mnist(
        options.data_dir, num_seeds=options.seeds or 3, advance=advance, plots=Path("runs")
    )
    return fa_ld.fashion_mnist_findings(figures)


PAPERS: dict[str, dict[str, Experiment]] = {
    "fa-ld": {
        "bayes-linear": Experiment(
            "distance of the samples from a known posterior, one seed", _bayes_linear
        ),
        "fashion-mnist": Experiment(
            "posterior averaging on Fashion-MNIST, mean (range) over the seeds; "
            "the entropies' histogram is runs/fa-ld-entropy.png",
            _fashion_mnist,
        ),
    },
    "fat-clipping": {
        "cauchy": Experiment(
            "mean of ‖x‖² over the last 20 of 200 rounds, quadratic with Cauchy noise", _cauchy
        ),
    },
    "dp-normfedavg": {
        "fashion-mnist": Experiment(
            "normalising against clipping under privacy, Fashion-MNIST, 3000 clients", _fashion
        ),
        "quadratic": Experiment(
            "suboptimality of clipping over normalising, the quadratic of section 5.3", _quadratic
        ),
    },
    "understanding-clipping": {
        "table-4": Experiment(
            "stationary points of FedAvg on three quadratics, from three initial points",
            lambda _options, _advance: stationary_points.table_4_findings(),
        ),
        "claim-2.1": Experiment(
            "where model clipping ends",
            lambda _options, _advance: stationary_points.claim_2_1_findings(),
        ),
        "mnist": Experiment("clipping on MNIST, 1920 clients with two digits each", _mnist),
    },
}


def reproduce(paper: str, only: str | None, options: Options, console: Console) -> bool:
    """Run a paper's experiments, or one of them; whether every figure is what it should be.

    Raises ConfigError for a name that is not known.
    """
    experiments = _chosen(paper, only)
    holds = True
    for name, experiment in experiments.items():
        findings = _measure(name, experiment, options, console)
        console.print(_table(f"{paper}, {name}: {experiment.about}", findings))
        holds = holds and all(finding.holds for finding in findings)
    return holds


def _chosen(paper: str, only: str | None) -> dict[str, Experiment]:
    if paper not in PAPERS:
        raise ConfigError(f"paper = {paper!r} is not known: {', '.join(PAPERS)}")
    experiments = PAPERS[paper]
    if only is None:
        return experiments
    if only not in experiments:
        raise ConfigError(f"--only {only} is not known for {paper}: {', '.join(experiments)}")
    return {only: experiments[only]}


def _measure(
    name: str, experiment: Experiment, options: Options, console: Console
) -> list[Finding]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(name, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        try:
            return experiment.run(options, advance)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("should be", justify="right")
    table.add_column("verdict")
    for finding in findings:
        verdict = "[green]as it should be[/]" if finding.holds else "[red]differs[/]"
        if not finding.expected:  # a figure for comparison
            verdict = ""
        table.add_row(finding.what, finding.measured, finding.expected, verdict)
    return table
