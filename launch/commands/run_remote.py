"""`blackthorn run`, `follow` and `stop`: runs at a server somewhere else."""

import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blackthorn.launch.commands.output import again_with_resume
from blackthorn.launch.commands.recipes import Recipe, Settings, recipe_config
from blackthorn.launch.federation.operator_options import (
    DEFAULT_SERVER,
    Ca,
    Connection,
    IKnow,
    Insecure,
    Server,
    connection,
)
from blackthorn.settings.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from blackthorn.flower_port.control_api import ControlApi, RunStatus
    from blackthorn.launch.federation.run_log import RunLog

# A run that has not said how long it may take is given so long to begin.
_START_SECONDS = 300.0
_LOOK_SECONDS = 1.0


def run(
    recipe: Recipe,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Stay until the run has ended, and end as it did.")
    ] = False,
    clients: Annotated[int | None, typer.Option(help="How many clients take part.")] = None,
    settings: Settings = None,
    output_dir: Annotated[
        str | None,
        typer.Option(help="Run folder on the server; relative to its --state folder."),
    ] = None,
    insecure: Insecure = False,
    i_know: IKnow = False,
) -> None:
    """Start a recipe at a server, with the clients that are connected there.

    Example: blackthorn run recipes/demo.toml --server fl.example.org:9093 --ca ca.crt --follow
    """
    to = connection(server, ca, insecure, i_know)
    options = {"num-clients": clients, "output-dir": output_dir, **_nobody_told_to_lie(settings)}
    # With TLS the server takes registered keys only (`blackthorn server` knows no other way).
    defaults = {"node-authentication": to.ca is not None}
    config = recipe_config(recipe, settings or (), options, defaults)
    with to.open() as control:
        run_id = _submit(config, to)
        typer.echo(f"run {run_id} has started")
        if follow:
            again = _again("follow", run_id, to)
            raise typer.Exit(watch(control, run_id, again, again_with_resume))
        typer.echo(f"see how it goes: {_again('follow', run_id, to)}")


def follow(
    run_id: Annotated[int, typer.Argument(help="As `blackthorn run` said.")],
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    insecure: Insecure = False,
    i_know: IKnow = False,
) -> None:
    """Show a run's rounds from the first on, and end as it does: 0, 1 or 2.

    Example: blackthorn follow 1234 --server fl.example.org:9093 --ca ca.crt
    """
    to = connection(server, ca, insecure, i_know)
    with to.open() as control:
        _check_known(control, run_id)
        again = _again("follow", run_id, to)
        raise typer.Exit(watch(control, run_id, again, lambda folder: _go_on(folder, to)))


def stop(
    run_id: Annotated[int, typer.Argument(help="As `blackthorn run` said.")],
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    insecure: Insecure = False,
    i_know: IKnow = False,
) -> None:
    """Stop a run.

    Example: blackthorn stop 1234 --server fl.example.org:9093 --ca ca.crt
    """
    with connection(server, ca, insecure, i_know).open() as control:
        _check_known(control, run_id)
        typer.echo("stopped" if control.stop(run_id) else "it had ended before")


def watch(control: "ControlApi", run_id: int, again: str, go_on: Callable[[str], str]) -> int:
    """Print the run's rounds, whom it waits for, and which clients cannot take part, to its end.

    `again` is the command that looks at it once more, `go_on` gives the one that goes on with the
    failed run in a folder.

    Returns its exit code: 0, 1 failed, 2 misconfigured, 130 for Ctrl-C.
    """
    import grpc

    from blackthorn.launch.commands.progress import round_line
    from blackthorn.launch.federation.run_log import RunLog

    log, after, away = RunLog(), 0.0, False
    began = time.monotonic()
    try:
        while True:
            try:
                status = control.status(run_id)
                text, after = control.new_log(run_id, after, _LOOK_SECONDS)
                away = False
            except grpc.RpcError:
                if not away:
                    _say("the server does not answer; trying again until it does")
                status, text, away = None, "", True
                time.sleep(_LOOK_SECONDS)
            for entry in log.read(text):
                typer.echo(round_line(entry, log.rounds))
            for line in log.news():
                _say(line)
            if status is not None and status.finished:
                return _tell_end(log, status, go_on)
            if time.monotonic() - began > (log.longest_seconds or _START_SECONDS):
                _say(f"the run has not ended in the time it may take; look again with: {again}")
                return 1
    except KeyboardInterrupt:
        _say(f"the run goes on; see how it goes: {again}")
        return 130


def _tell_end(log: "RunLog", status: "RunStatus", go_on: Callable[[str], str]) -> int:
    if log.folder:
        here = " (on this machine)" if Path(log.folder).is_dir() else " (on the server)"
        typer.echo(f"run folder: {log.folder}{here}")
    if status.completed and log.summary is not None:
        _tell_summary(log.summary)
        return 0
    if status.completed:
        return 0
    reason = log.failure or f"{status} {status.details}".strip()
    if status.stopped:
        _say("stopped")
    else:
        _say(f"error: {reason}" if log.misconfigured else f"failed: {reason}")
    if log.resumable and not log.misconfigured:
        _say(f"to go on with it: {go_on(log.folder)}")
    return 2 if log.misconfigured else 1


def _tell_summary(summary: dict[str, Any]) -> None:
    from blackthorn.launch.commands.progress import reached, taken
    from blackthorn.launch.federation.run_log import privacy_said

    said = reached(summary["final"]) + privacy_said(summary)
    typer.echo(f"{summary['status']}: {summary['rounds_completed']} rounds{taken(summary)}{said}")


def _nobody_told_to_lie(settings: list[str] | None) -> dict[str, Any]:
    """In a real federation whoever lies does so by himself: a recipe's attack is for simulations.

    Raises ConfigError where it is asked for on the command line.
    """
    for setting in settings or ():
        if setting.partition("=")[0].strip() in ("attack", "num-byzantine"):
            raise ConfigError(
                f"--set {setting} is not allowed here: clients of a real federation take no orders "
                "to lie; start Byzantine ones as docs/attacks.md says"
            )
    return {"attack": "none", "num-byzantine": 0}


def _submit(config: RunConfig, to: Connection) -> int:
    from blackthorn.installation import APP_ROOT
    from blackthorn.launch.federation.app_bundle import COMPONENTS
    from blackthorn.launch.federation.process_environment import QUIET, write_connection
    from blackthorn.launch.federation.submission import submit
    from blackthorn.settings.config import to_mapping
    from blackthorn.settings.own_code import OWN_CODE_KEYS

    values = to_mapping(config)
    if any(":" in str(values[key]) for key in OWN_CODE_KEYS):
        from blackthorn.server_app.build import check_names

        check_names(config)
    with tempfile.TemporaryDirectory(prefix="blackthorn-") as name:
        folder = Path(name)
        write_connection(folder / "home", str(to.address), to.ca)
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
        return submit(
            APP_ROOT,
            values,
            parts=COMPONENTS,
            work=folder / "run",
            env={
                **os.environ,
                **QUIET,
                # As all else that an operator asks: through no proxy.
                "no_grpc_proxy": to.address.host,
                "FLWR_HOME": str(folder / "home"),
                "PATH": path,
            },
            cwd=folder,
            own_code=OWN_CODE_KEYS,
        )


def _check_known(control: "ControlApi", run_id: int) -> None:
    try:
        control.status(run_id)
    except KeyError:
        raise ConfigError(f"the server knows no run {run_id}") from None


def _again(command: str, run_id: int, to: Connection) -> str:
    return f"blackthorn {command} {run_id} {_where(to)}"


def _go_on(folder: str, to: Connection) -> str:
    """The folder's own recipe where it is on this machine."""
    config = Path(folder) / "config.toml"
    recipe = config if config.exists() else "RECIPE"
    return f"blackthorn run {recipe} {_where(to)} --set resume={folder}"


def _where(to: Connection) -> str:
    trust = f"--ca {to.ca}" if to.ca else "--insecure"
    return f"--server {to.address} {trust}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
