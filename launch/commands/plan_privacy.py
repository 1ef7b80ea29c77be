"""`blackthorn plan-privacy`: which mechanism spends a budget best, and who has to be trusted."""

import math
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blackthorn.settings.config import ConfigError
from blackthorn.settings.rounding import exact, upward

if TYPE_CHECKING:
    from blackthorn.reporting.privacy_options import Option, Question

console = Console()
_RULE = (
    "Noise and updates are lengths of a round's mean update, or of what all rounds add up to, in "
    "the unit of clip-norm. Expected to be lost, by a rule of thumb: the part of the squared way "
    "that is noise, where all updates agree; more where they do not (docs/privacy.md). Every z is "
    "for the whole budget. Against the server, too, with the noise of all clients or of a fixed "
    "cohort without amplification: secure aggregation (docs/secure-aggregation.md)."
)


def plan_privacy(
    clients: Annotated[int, typer.Option(min=2, help="Clients m of the population.")],
    rounds: Annotated[int, typer.Option(min=1, help="Communication rounds T.")],
    epsilon: Annotated[float, typer.Option(help="Budget of the whole run.")],
    delta: Annotated[float, typer.Option(help="delta of the budget.")] = 1e-5,
    bands: Annotated[
        int, typer.Option(min=2, help="A round asks one in so many of the clients.")
    ] = 10,
    dimension: Annotated[
        int | None, typer.Option(min=1, help="Parameters d of the model; or --pilot.")
    ] = None,
    clip_norm: Annotated[float, typer.Option(help="C.")] = 1.0,
    update_norm: Annotated[
        float | None, typer.Option(help="Usual length of an update, in C's unit; or --pilot.")
    ] = None,
    pilot: Annotated[
        Path | None,
        typer.Option(help="Folder of a pilot run, for d and the length (gradient units)."),
    ] = None,
    accountant: Annotated[str, typer.Option(help="rdp, prv or pld.")] = "pld",
    plot: Annotated[Path | None, typer.Option(help="A PNG of the comparison.")] = None,
) -> None:
    """Compare what a privacy budget buys: Poisson, fixed and rotating cohorts, adaptive thresholds,
    noise at the clients.

    Example: blackthorn plan-privacy --clients 300 --rounds 100 --epsilon 5 --dimension 650
    """
    from blackthorn.reporting.privacy_options import Question, compare, plot_options
    from blackthorn.strategies.accounting import ACCOUNTANTS

    if (by := next((one for one in ACCOUNTANTS if one == accountant), None)) is None:
        allowed = ", ".join(ACCOUNTANTS)
        raise ConfigError(f"accountant = {accountant!r} is not allowed: {allowed}")
    for name, value in (("clip-norm", clip_norm), ("update-norm", update_norm)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value} is not allowed: above 0, finite")
    if bands > clients:
        raise ConfigError(f"bands = {bands} is not allowed: at most clients = {clients}")
    if plot is not None and plot.suffix != ".png":
        raise ConfigError(f"--plot {plot} is not allowed: a name that ends in .png")
    if pilot is not None:
        of_pilot = _measured(pilot)
        dimension = dimension or of_pilot[0]
        update_norm = update_norm or of_pilot[1]
    if dimension is None:
        raise ConfigError("dimension is needed: the parameters of the model, or --pilot FOLDER")
    question = Question(
        *(clients, rounds, epsilon, delta, dimension, bands, clip_norm),
        update_norm=update_norm or clip_norm,
        accountant=by,
    )
    try:
        options = compare(question)
        if all(option.refused for option in options):
            raise ValueError(options[0].refused)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _print(question, options, pilot)
    if plot is not None:
        try:
            console.print(str(plot_options(question, options, plot)), soft_wrap=True)
        except OSError as error:
            raise ConfigError(f"{plot} cannot be written: {error.strerror}") from error


def _measured(folder: Path) -> tuple[int, float]:
    """d, and the median length of the updates in gradient units, of a run with instruments.

    Raises ConfigError, one line, where there is none.
    """
    from blackthorn.recording.run_folder import read_metrics
    from blackthorn.reporting.prediction import load_run

    _, problem = load_run(folder)
    told = [entry.get("instruments") or {} for entry in read_metrics(folder)]
    norms = [n for one in told for n in one.get("norm_gradient", {}).values() if n is not None]
    if not norms:
        raise ConfigError(
            f"pilot = {folder} is not allowed: it has measured no updates (instruments = true, as "
            "of blackthorn pilot)"
        )
    return problem.model.dimension, median(norms)


def _print(question: "Question", options: "list[Option]", pilot: Path | None) -> None:
    q = question
    console.print(
        f"epsilon = {exact(q.epsilon)}, delta = {exact(q.delta)}, {q.rounds} rounds, {q.clients} "
        f"clients, 1/{q.groups} of them a round, d = {q.dimension}, clip-norm {q.clip_norm:g}, "
        f"updates of {q.update_norm:.4g}"
        + (" (measured on the clients' data: not private)" if pilot else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("", "r", "z", "noise, a round", "all rounds", "lost", "who is trusted"):
        table.add_column(head, justify="left" if head in ("", "who is trusted") else "right")
    for one in options:
        figures = ("-",) * 5
        if not one.refused:
            figures = (
                f"{one.cohort:g}",
                upward(one.multiplier, 4),
                upward(one.round_noise, 3),
                upward(one.total_noise, 3),
                f"{100 * one.lost:.2g} %",
            )
        table.add_row(one.name, *figures, one.refused or one.trusted)
    console.print(table, markup=False, highlight=False)
    signal = q.rounds * min(q.update_norm, q.clip_norm)
    console.print(
        f"\nUpdates that all agree: {min(q.update_norm, q.clip_norm):.4g} a round, {signal:.4g} "
        f"all rounds together.\n\n{_RULE}\n",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for one in options:
        console.print(f"{one.name}: {one.settings}", markup=False, highlight=False, soft_wrap=True)
