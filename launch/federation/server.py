"""`blackthorn server`: a SuperLink and the executor of its ServerApps, kept alive."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from blackthorn.launch.federation.addresses import (
    LOOPBACK,
    Address,
    check_free,
    check_insecure,
    host_of,
    is_loopback,
    parse_address,
)
from blackthorn.launch.federation.members import ServerSettings
from blackthorn.launch.federation.operator_options import IKnow, Insecure, make_folder
from blackthorn.launch.federation.web_port import METRICS_BIND, MetricsBind, web_address
from blackthorn.settings.config import ConfigError

_READY_SECONDS = 120.0
# So often the server looks whether a day is over.
_WARNED_SECONDS = 60.0
METRICS_PORT = 9095


def server(
    host: Annotated[str, typer.Option(help="The name or IP address that clients dial.")],
    state: Annotated[
        Path, typer.Option(help="Folder for the database, the logs, and the runs.")
    ] = Path("state"),
    certs: Annotated[Path | None, typer.Option(help="Folder of `blackthorn certs`.")] = None,
    port: Annotated[int, typer.Option(help="Port for the clients.")] = 9092,
    bind: Annotated[
        str | None,
        typer.Option(help="Address the clients' port listens on; by default all of this machine."),
    ] = None,
    control: Annotated[
        str, typer.Option(help="Address for operators; whoever reaches it commands everything.")
    ] = "127.0.0.1:9093",
    resume: Annotated[
        bool,
        typer.Option(help="Go on with runs whose ServerApp, server or machine ended under way."),
    ] = True,
    health: Annotated[
        str | None,
        typer.Option(
            help="Address of a gRPC health service, for whoever watches over the server; by "
            "default on a free port of this machine."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help=f"Port of /metrics (Prometheus) and /healthz (docs/operations.md); 0: none; by "
            f"default {METRICS_PORT}, where that is free."
        ),
    ] = None,
    metrics_bind: MetricsBind = METRICS_BIND,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A limit of the guard (docs/security.md)."),
    ] = None,
    insecure: Insecure = False,
    i_know: IKnow = False,
) -> None:
    """Run the server of a federation until it is stopped.

    Clients reach one port. Everything else listens on the loopback interface.

    Example: blackthorn server --host fl.example.org --certs certs --state state
    """
    if insecure == (certs is not None):
        raise ConfigError("give either --certs DIR, or --insecure")
    if not 0 < port < 65536:
        raise ConfigError(f"--port {port} is not allowed: 1 to 65535")
    if not host:
        raise ConfigError("--host is empty: the name or IP address that clients dial")
    host = host_of(host, "--host")
    bind = host_of(bind, "--bind") if bind is not None else None
    if insecure:
        check_insecure(host, i_know)
        check_insecure(bind or host, i_know)
        check_insecure(parse_address(control, "--control", 9093).host, i_know)
    local, all_of_it = ("::1", "::") if ":" in host else (LOOPBACK, "0.0.0.0")
    default = local if is_loopback(host) else all_of_it
    settings = ServerSettings(
        host=host,
        fleet=Address(bind or default, port),
        control=parse_address(control, "--control", 9093),
        certs=certs.resolve() if certs is not None else None,
        state=state.resolve(),
        resume=resume,
        limits=_checked_limits(limit or []),
        health=parse_address(health, "--health") if health is not None else None,
        web=web_address(METRICS_PORT if metrics_port is None else metrics_port, metrics_bind),
        web_wanted=metrics_port is not None,
    )
    serve(settings)


def _checked_limits(limits: list[str]) -> tuple[str, ...]:
    from blackthorn.flower_port.guard.limits import Limits

    try:
        Limits.changed(limits)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return tuple(limits)


def serve(settings: ServerSettings) -> None:
    """Run until a signal comes. Raises ConfigError before anything is started; NotYet where the
    disk is full."""
    from blackthorn.launch.federation.certificates import CertificateError, check_server_files
    from blackthorn.launch.federation.server_programs import check_space

    if settings.certs is not None:
        try:
            check_server_files(settings.certs, settings.host)
        except CertificateError as error:
            raise ConfigError(str(error)) from error
    make_folder(settings.state, "--state")
    with _only_one(settings.state):
        check_space(settings.state)
        check_free(settings.fleet, "--bind/--port")
        check_free(settings.control, "--control")
        if settings.health is not None:
            check_free(settings.health, "--health")
        if settings.web is not None and settings.web_wanted:
            check_free(settings.web, "--metrics-bind/--metrics-port")
        _run(settings)


def _run(settings: ServerSettings) -> None:
    from blackthorn.flower_port.control_api import is_serving
    from blackthorn.launch.federation.addresses import free_loopback_ports
    from blackthorn.launch.federation.expiry import DailyWarnings
    from blackthorn.launch.federation.process_environment import write_secret
    from blackthorn.launch.federation.server_programs import (
        end_serverapps,
        lack_of_space,
        serverapp_environment,
        superexec_program,
        superlink_program,
    )
    from blackthorn.launch.federation.service import GRACE_SECONDS, say, service

    secret = write_secret(settings.state / "superexec-secret")
    apps, free = (Address(LOOPBACK, port) for port in free_loopback_ports(2))
    health = settings.health or free
    # The executor goes first, then the SuperLink that it asks.
    order = ["superexec", "superlink"]
    with service(settings.state / "logs", settings.state, warm=False, stop_order=order) as running:
        supervisor = running.supervisor
        env = running.environment.variables("server", extra=serverapp_environment(settings))
        say(f"starting; logs and runs are in {settings.state}")
        expiring = DailyWarnings(lambda: _expiring(settings))
        running.stack.enter_context(_shown(settings, health))
        running.stack.enter_context(_audited(settings))
        while True:
            supervisor.add(superlink_program(settings, apps, health, secret, env))
            if supervisor.run(lambda: is_serving(str(health)), _READY_SECONDS):
                say(
                    f"ready: clients connect to {settings.host}:{settings.fleet.port}, operators "
                    f"to {settings.control}"
                )
            supervisor.add(superexec_program(apps, secret, env))
            while not lack_of_space(settings.state):
                expiring.look()
                supervisor.run(lambda: bool(lack_of_space(settings.state)), _WARNED_SECONDS)
            # Before anything fails for want of it: what is stopped now goes on later.
            say(f"{lack_of_space(settings.state, to_go_on=True)}; the server waits for them")
            for name in order:
                supervisor.stop(name, GRACE_SECONDS, lambda: False)
            end_serverapps(settings.state)
            supervisor.run(lambda: not lack_of_space(settings.state, to_go_on=True))
            say("there is room again")


@contextmanager
def _audited(settings: ServerSettings) -> Iterator[None]:
    """The server's start and its end in the audit log, with who started it. OSError."""
    from blackthorn.flower_port.guard.audit import FILE, AuditLog
    from blackthorn.installation import CODE

    folder = settings.state / "guard"
    folder.mkdir(exist_ok=True)
    log = AuditLog(folder / FILE)
    told = {"by": f"uid {os.getuid()}", "pid": os.getpid()}
    log.write("server started", **told, code=CODE, tls=settings.certs is not None)
    try:
        yield
    finally:
        # A disk that is full must not keep it from ending.
        with suppress(OSError):
            log.write("server stopped", **told)


@contextmanager
def _shown(settings: ServerSettings, health: Address) -> Iterator[None]:
    """/metrics and /healthz, as long as the block lasts."""
    from blackthorn.launch.federation.measures import exposition
    from blackthorn.launch.federation.server_metrics import ServerMetrics, server_problem
    from blackthorn.launch.federation.service import say
    from blackthorn.launch.federation.web_port import METRICS_TYPE, Page, healthz, web_port

    metrics = ServerMetrics(settings, health)
    pages = {
        "/metrics": lambda: Page(exposition(metrics), kind=METRICS_TYPE),
        "/healthz": healthz(lambda: server_problem(settings, health)),
    }
    with web_port(settings.web, pages, wanted=settings.web_wanted, say=say):
        yield


def _expiring(settings: ServerSettings) -> list[str]:
    from blackthorn.launch.federation.expiry import at_the_server

    return at_the_server(settings.certs, settings.host) if settings.certs is not None else []


@contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """ConfigError if another server uses the folder."""
    try:
        lock = (state / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--state {state} cannot be written to: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"--state {state} is in use by another server") from error
        yield
