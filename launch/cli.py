"""The `blackthorn` command."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from typer.core import TyperCommand

from blackthorn.flower_port.versions import NotThisFlower, check_grpc
from blackthorn.installation import NotInstalled, require
from blackthorn.launch.commands.calibrate import app as calibrate_app
from blackthorn.launch.commands.comparisons import compare, recipes, sweep
from blackthorn.launch.commands.keys import keys
from blackthorn.launch.commands.output import (
    AsJson,
    Quiet,
    Version,
    failures_told,
    people_console,
    print_json,
    tell_how_to_go_on,
)
from blackthorn.launch.commands.plan_privacy import plan_privacy
from blackthorn.launch.commands.recipes import OutputDir, Recipe, Settings, recipe_config
from blackthorn.launch.commands.run_remote import follow, run, stop
from blackthorn.launch.commands.runs import app as runs_app
from blackthorn.launch.commands.suspects import suspects
from blackthorn.launch.federation.certs import certs
from blackthorn.launch.federation.client import client
from blackthorn.launch.federation.register import register, unregister
from blackthorn.launch.federation.server import server
from blackthorn.launch.federation.status import status
from blackthorn.launch.processes.interrupts import termination_unwinds
from blackthorn.settings.config import ConfigError


class NeedsApp(TyperCommand):
    """A command that needs the extra `app`, and says so where it is not installed."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; NotInstalled without the extra."""
        require("app", f"blackthorn {self.name}")
        return super().invoke(ctx)


class NeedsGrpc(NeedsApp):
    """A command that talks with Flower's programs, or starts them: all hops are gRPC."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; NotThisFlower where the installed Flower speaks otherwise."""
        check_grpc()
        return super().invoke(ctx)


app = typer.Typer(
    name="blackthorn",
    help="Federated learning that survives fat tails, privacy budgets and clients that lie.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(calibrate_app, name="calibrate")
app.add_typer(runs_app, name="runs")
app.command(cls=NeedsApp)(certs)
app.command("plan-privacy", cls=NeedsApp)(plan_privacy)
app.command(cls=NeedsApp)(suspects)
app.command()(keys)
app.command()(recipes)
app.command(cls=NeedsApp)(sweep)
app.command(cls=NeedsApp)(compare)
for command in (server, client, register, unregister, run, follow, stop, status):
    app.command(cls=NeedsGrpc)(command)
console = Console()
_SIGNALLED = {130: "interrupted", 143: "terminated"}


@app.callback()
def blackthorn(version: Version = False) -> None:
    """What goes for every command."""


@app.command(cls=NeedsApp)
def simulate(
    recipe: Recipe,
    settings: Settings = None,
    output_dir: OutputDir = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe in this process.

    Example: blackthorn simulate recipes/demo.toml --set attack=all-ones
    """
    from blackthorn.launch.commands.chains import simulate_chains
    from blackthorn.launch.commands.simulate import simulate as run_one

    config = recipe_config(recipe, settings or (), {"output-dir": output_dir})
    run = simulate_chains if config.chains > 1 else run_one
    with failures_told(as_json):
        finish(run(config, people_console(quiet, as_json)), as_json)


@app.command(cls=NeedsGrpc)
def cluster(
    recipe: Recipe,
    clients: Annotated[int | None, typer.Option(help="Clients, one SuperNode each.")] = None,
    byzantine: Annotated[int | None, typer.Option(help="How many of them lie.")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A client's own .npz or image folder; once for every client."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="What every client may send, as of blackthorn client (docs/privacy.md)."),
    ] = None,
    settings: Settings = None,
    output_dir: OutputDir = None,
    standard_clients: Annotated[
        bool, typer.Option(help="Flower's own client program: a new Python for every message.")
    ] = False,
    rogue: Annotated[
        str,
        typer.Option(
            metavar="BEHAVIOUR",
            help="The attackers are no SuperNodes but processes that break Flower's protocol so "
            "(several by commas, one a round).",
        ),
    ] = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe as a real deployment on this machine: processes that talk over gRPC.

    Example: blackthorn cluster recipes/demo.toml --clients 5 --byzantine 1
    """
    from blackthorn.launch.commands.cluster import cluster as run

    options = {
        "num-clients": clients if clients is not None or not data else len(data),
        "num-byzantine": byzantine,
        "output-dir": output_dir,
    }
    config = recipe_config(recipe, settings or (), options)
    people = people_console(quiet, as_json)
    with failures_told(as_json):
        summary = run(
            config,
            people,
            data=data or (),
            policy=policy,
            warm=not standard_clients,
            rogue=rogue,
        )
        finish(summary, as_json)


@app.command(cls=NeedsGrpc)
def demo(
    recipe: Annotated[Path, typer.Option(help="Recipe with an attack.")] = Path("demo"),
    output_dir: Annotated[Path, typer.Option(help="Folder of all its runs.")] = Path("runs/demo"),
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Plain averaging against RAGE, with clients that lie; then real processes over gRPC.

    Example: blackthorn demo
    """
    from blackthorn.launch.commands.demo import demo as run

    with failures_told(as_json):
        summaries = run(recipe, output_dir, people_console(quiet, as_json))
    if as_json:
        print_json(summaries)
    elif quiet:
        for rule, summary in summaries.items():
            finish(summary, label=f"[{rule}] ")


@app.command(cls=NeedsApp)
def pilot(
    recipe: Recipe,
    settings: Settings = None,
    output_dir: OutputDir = None,
    quiet: Quiet = False,
) -> None:
    """Measure a clipping threshold: the recipe once, honest and unclipped.

    Example: blackthorn pilot recipes/demo.toml
    """
    from blackthorn.launch.commands.pilot import pilot as run

    run(recipe, settings or (), output_dir, console, people_console(quiet, as_json=False))


@app.command(cls=NeedsApp)
def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="fat-clipping, dp-normfedavg, understanding-clipping, fa-ld, rage or all."
        ),
    ],
    only: Annotated[str | None, typer.Option(help="One of the paper's experiments.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="At reduced scale, in three minutes on two cores.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds, where an experiment has many.")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Draws of the initial weights alone, of rage (in full: 5)."),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of report.html and the numbers; empty: under runs/reproduce."),
    ] = None,
    data_dir: Annotated[
        str, typer.Option(help="Folder of the data sets, as the key data-dir.")
    ] = "",
    quiet: Quiet = False,
) -> None:
    """Measure a paper's tables and figures anew and write a report; exits with 1 if a verdict is
    not the expected one. The same command goes on where an interrupted one stopped.

    Example: blackthorn reproduce fat-clipping --quick
    """
    from blackthorn.experiments.study import Scale
    from blackthorn.launch.commands.reproduce import Options
    from blackthorn.launch.commands.reproduce import reproduce as run

    options = Options(Scale(quick, seeds, data_dir, draws), only, output_dir)
    if not run(paper, options, console, people_console(quiet, as_json=False)):
        raise typer.Exit(1)


@app.command(cls=NeedsApp)
def predict(
    run: Annotated[Path, typer.Argument(help="Run folder of a finished run.")],
    data: Annotated[
        Path,
        typer.Option(
            help="An .npz file: x [n, *shape] as the model was trained on it (bytes count as "
            "0 to 1), and y where it is known."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file for all predictions (probabilities, entropy; of posterior samples "
            "also mutual_information and point); plots go beside it, else into RUN/predictions."
        ),
    ] = None,
    ood: Annotated[
        Path | None, typer.Option(help="Examples from elsewhere: a histogram of entropies.")
    ] = None,
) -> None:
    """Predict with a run's final model, or with its posterior samples (fa-ld) and the final model
    beside them.

    Example: blackthorn predict runs/my-run --data examples.npz
    """
    from blackthorn.launch.commands.predict import predict as run_predict

    run_predict(run, data, console, out=out, ood=ood)


@app.command(cls=NeedsApp)
def diagnose(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, one chain each.")],
    as_json: AsJson = False,
) -> None:
    """Whether the posterior samples of one or several runs have mixed.

    Example: blackthorn diagnose runs/chain-1 runs/chain-2
    """
    from blackthorn.launch.commands.diagnose import diagnose_runs

    found = diagnose_runs(runs, people_console(quiet=False, as_json=as_json))
    if as_json:
        print_json({"scalars": [asdict(diagnosis) for diagnosis in found]})


@app.command(cls=NeedsApp)
def audit(
    recipe: Recipe,
    canaries: Annotated[int, typer.Option(help="Canary clients in the one long run.")] = 100,
    runs: Annotated[
        int, typer.Option(help="Short runs with what neighbours differ in, and as many without.")
    ] = 200,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Try to refute a recipe's privacy claims, in this process.

    Example: blackthorn audit recipes/dp-digits.toml
    """
    from blackthorn.launch.commands.audit import audit as run
    from blackthorn.launch.commands.audit import audit_report

    config = recipe_config(recipe, settings or ())
    result = run(config, canaries, runs, people_console(quiet, as_json))
    if as_json:
        print_json({**asdict(result), "refuted": result.refuted})
    else:
        console.print(audit_report(result), markup=False, highlight=False)
    if result.refuted:
        raise typer.Exit(1)


@app.command(cls=NeedsApp)
def report(
    run: Annotated[Path, typer.Argument(help="Run folder, also of a run that was killed.")],
) -> None:
    """Write a run's plots and its report.html anew, from what is in its folder.

    Example: blackthorn report runs/demo/rage
    """
    from blackthorn.reporting.run_report import write_report

    console.print(str(write_report(run)), markup=False, highlight=False, soft_wrap=True)


def finish(summary: dict[str, Any], as_json: bool = False, label: str = "") -> None:
    """Say how the run ended."""
    if as_json:
        print_json(summary)
        return
    from blackthorn.launch.commands.progress import reached, taken
    from blackthorn.launch.federation.run_log import privacy_said

    said = reached(summary["final"]) + privacy_said(summary)
    console.print(
        f"{label}{summary['status']}: {summary['rounds_completed']} rounds{taken(summary)}{said}",
        markup=False,
        highlight=False,
    )
    if "posterior" in summary:
        from blackthorn.launch.commands.posterior_lines import posterior_lines

        text = "\n".join(posterior_lines(summary["posterior"]))
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line: 0 done, 1 a run that failed, 2 a wrong configuration; 130 and 143 for
    Ctrl-C and SIGTERM, after everything that was started has been stopped and written down."""
    try:
        with termination_unwinds():
            app(prog_name="blackthorn")
    except (ConfigError, NotInstalled, NotThisFlower) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        from blackthorn.launch.federation.deployment import DeploymentError
        from blackthorn.launch.federation.probe import Refused
        from blackthorn.launch.processes.supervisor import NotYet
        from blackthorn.recording.failure_reason import RunFailed
        from blackthorn.strategies import NotEnoughClients
        from blackthorn.strategies.ledger import LedgerInUse
        from blackthorn.strategies.run_state import NotEnoughReplies

        known = (
            RunFailed
            | NotEnoughClients
            | NotEnoughReplies
            | LedgerInUse
            | DeploymentError
            | Refused
            | NotYet
        )
        if not isinstance(error, known):
            raise
        print(f"failed: {error}", file=sys.stderr)
        tell_how_to_go_on(error)
        sys.exit(1)
    except OSError as error:
        # A full disk, or a TMPDIR that cannot be used, wherever it was needed.
        where = f": {error.filename}" if error.filename else ""
        print(f"failed: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as end:
        # Typer has made an exit of KeyboardInterrupt.
        if end.code in _SIGNALLED:
            print(_SIGNALLED[end.code], file=sys.stderr)
        raise
