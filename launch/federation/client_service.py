"""The processes behind `blackthorn client`, and Flower's refusals in our words."""

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from blackthorn.flower_port.programs import CLOCK, FAILED_CALL
from blackthorn.launch.federation.addresses import LOOPBACK, free_loopback_ports
from blackthorn.launch.processes.supervisor import Program, describe_exit

from .addresses import Address
from .app_bundle import Scalar, write_config
from .expiry import DailyWarnings, at_a_client
from .flower_cluster import APP_MODULES
from .members import ClientSettings
from .probe import Refused, probe
from .process_environment import fork_server_command, write_secret
from .service import Service, say, service
from .web_port import METRICS_TYPE, Page, Pages, healthz, web_port

_FORK_SERVER_SECONDS = 120.0
# So often a client looks whether a day is over.
_WARNED_SECONDS = 60.0
_CONNECTED = re.compile(r"SuperNode ID: (\d+)")
_CANNOT = re.compile(r"client \d+ (cannot take part|does not \w+) in run \d+: .*")
_ROUND = re.compile(r"\[RUN (\d+), ROUND (\d+)\]")
# Flower's codes: nodes must be registered, and: this node cannot be activated.
_CODE = re.compile(r'"code": (\d+)')
_FAILED = re.compile(re.escape(FAILED_CALL) + r"(\w+): (.*)")
# A refusal of the guard's, which names the method; Flower takes it for the end of the run.
_REFUSED = re.compile(r"[A-Z][A-Za-z]+: .")
# What the server says of a key that is not registered; of one that was, of the node that it had.
_NOT_REGISTERED = ("a key that is not registered", "Invalid node ID")
_NO_KEY, _KEY_REFUSED = "2001", "2004"
_KEY_UNREADABLE = "Unable to parse the private key"


def take_part(settings: ClientSettings) -> None:
    """Run until a signal comes. Raises Refused when the server does not take this client."""
    warm = settings.warm and sys.platform == "linux"
    order = ["supernode", "superexec"]
    with service(settings.logs, Path.cwd(), warm=warm, stop_order=order) as running:
        path = []
        if settings.program is not None:
            path.append(running.environment.client_program(settings.program))
        env = running.environment.variables("client", path=path)
        apps = Address(LOOPBACK, free_loopback_ports(1)[0])
        secret = write_secret(running.environment.folder / "secret")
        say(f"client {settings.client_id} of {settings.server}; logs are in {settings.logs}")
        if settings.policy is None and settings.ledger is not None:
            say(
                f"{settings.ledger} counts what Blackthorn's ClientApp and mod send; without a "
                "policy the server's own app runs here, which may have neither"
            )
        if settings.policy is not None:
            say(f"policy {settings.policy} is in force; {settings.ledger} counts what is sent")
            if settings.data is None:
                say(
                    "it keeps no secret of a share that a task deals out, which the server has as "
                    "well: --data names examples that are this client's alone"
                )
        # Whether the server takes us is known before the apps' modules are imported.
        watch = Watch(settings)
        running.supervisor.add(_supernode(settings, running, apps, secret, env, watch))
        if settings.web is not None:
            shown = web_port(settings.web, _pages(settings, watch), wanted=True, say=say)
            running.stack.enter_context(shown)
        if warm:
            _start_fork_server(running, env)
        running.supervisor.add(_superexec(apps, secret, env))
        expiring = DailyWarnings(lambda: at_a_client(settings.server, settings.ca))
        while True:
            expiring.look()
            running.supervisor.run(lambda: False, _WARNED_SECONDS)


def _pages(settings: ClientSettings, watch: "Watch") -> Pages:
    from .client_metrics import ClientMetrics
    from .measures import exposition

    metrics = ClientMetrics(settings.ca, lambda: watch.problem)
    return {
        "/metrics": lambda: Page(exposition(metrics), kind=METRICS_TYPE),
        "/healthz": healthz(lambda: watch.problem),
    }


def _start_fork_server(running: Service, env: Mapping[str, str]) -> None:
    socket = running.environment.app_socket
    command = fork_server_command(socket, APP_MODULES)
    running.supervisor.add(Program("fork-server", command, env))
    if not running.supervisor.run(socket.exists, _FORK_SERVER_SECONDS):
        say("the apps' modules are still not imported: messages will fail until they are")


def _supernode(
    settings: ClientSettings,
    running: Service,
    apps: Address,
    secret: Path,
    env: Mapping[str, str],
    watch: "Watch",
) -> Program:
    config = write_config(_node_config(settings), running.environment.folder / "node.toml")
    command = ["flower-supernode", "--superlink", str(settings.server), "--isolation", "process"]
    command += ["--clientappio-api-address", str(apps), "--node-config", str(config)]
    command += ["--superexec-auth-secret-file", str(secret)]
    if settings.ca is None:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str(settings.ca)]
    if settings.key is not None:
        command += ["--auth-supernode-private-key", str(settings.key)]
    return Program(
        "supernode", command, env, before=watch.before, on_line=watch.line, on_end=watch.end
    )


def _superexec(apps: Address, secret: Path, env: Mapping[str, str]) -> Program:
    command = ["flower-superexec", "--insecure", "--plugin-type", "clientapp"]
    command += ["--appio-api-address", str(apps), "--superexec-auth-secret-file", str(secret)]
    return Program("superexec", command, env, on_line=AppWatch().line)


def _node_config(settings: ClientSettings) -> dict[str, Scalar]:
    # Other people's apps look for a partition-id.
    config: dict[str, Scalar] = {
        "client-id": settings.client_id,
        "partition-id": settings.client_id,
    }
    if settings.data is not None:
        config["data-path"] = str(settings.data)
    if settings.data_dir is not None:
        config["data-dir"] = str(settings.data_dir)
    named = (("policy", settings.policy), ("ledger", settings.ledger))
    for key, path in (*named, ("members", settings.members), ("identity-key", settings.key)):
        if path is not None:
            config[key] = str(path)
    if settings.ledger_id:
        config["ledger-id"] = settings.ledger_id
    return config


class AppWatch:
    """Follows the ClientApps' output: says once a run why this client cannot take part."""

    def __init__(self) -> None:
        self._said = ""

    def line(self, line: str) -> None:
        """Take in a line of the apps' output."""
        found = _CANNOT.search(line)
        if found and found.group() != self._said:
            self._said = found.group()
            say(self._said)


class Watch:
    """Follows the SuperNode's output: says when it is connected, and why it is not."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._connected = False
        self._away = False
        self._round = ""
        self._complaint = ""
        self._code, self._words = "", ""
        self._refused_since: float | None = None
        # There while the client is connected: a cheap check for whoever watches over it.
        self._flag = settings.logs / "connected"

    @property
    def problem(self) -> str:
        """Why the server cannot reach this client at the moment; empty: it can."""
        if not self._connected:
            return f"not connected to {self._settings.server}"
        return f"{self._settings.server} does not answer" if self._away else ""

    def before(self) -> None:
        """Ask the network first. Raises NotYet, or Refused."""
        self._flag.unlink(missing_ok=True)
        self._complaint = self._code = self._words = ""
        probe(self._settings.server, self._settings.ca)

    def line(self, line: str) -> None:
        """Take in a line of the SuperNode's output."""
        if found := _CONNECTED.search(line):
            self._connected, self._away, self._refused_since = True, False, None
            self._flag.touch()
            say(f"connected to {self._settings.server} as node {found.group(1)}")
        elif found := _FAILED.search(line):
            self._failed(*found.groups())
        elif CLOCK in line:
            say(line[line.index(CLOCK) :].partition(": ")[2])
        elif "successfully" in line and self._code != "UNAUTHENTICATED":
            self._code = ""
        elif "Connection successful after" in line and self._away:
            self._away = False
            say(f"{self._settings.server} answers again")
        elif (found := _ROUND.search(line)) and found.group() != self._round:
            self._round = found.group()
            say(f"round {found.group(2)} of run {found.group(1)}")
        elif found := _CODE.search(line):
            self._complaint = found.group(1)
        elif _KEY_UNREADABLE in line:
            self._complaint = _KEY_UNREADABLE
        elif "Failed to receive message" in line or "Failed to send message" in line:
            # Behind it comes gRPC's own account of the call, in several lines.
            say(line[line.index("Failed") :].partition(": <")[0])

    def _failed(self, code: str, words: str) -> None:
        """Take in what a call failed with."""
        # Once it is sent away, or told to stop, what else it has under way fails too.
        if code == "CANCELLED" or self._code == "UNAUTHENTICATED":
            return
        self._code, self._words = code, words
        if found := _CODE.search(words):
            self._complaint = found.group(1)
        if code == "UNAVAILABLE" and not self._away:
            self._away = True
            # Other words than the server's are gRPC's, of a connection that there is not.
            why = f": {words}" if words.startswith("the server") else ""
            say(f"{self._settings.server} does not answer{why}; trying again until it does")
        elif code == "PERMISSION_DENIED" and _REFUSED.match(words):
            say(
                f"{self._settings.server} refused what this client sent: {words} (its operator's "
                "limits; the answer does not count)"
            )

    def end(self, status: int | None, tail: str) -> str:
        """Why it ended. Raises Refused where starting it again would change nothing."""
        connected, self._connected = self._connected, False
        if not connected:
            self._raise_if_hopeless()
            if self._complaint == _KEY_REFUSED:
                return self._refused(
                    "another program is connected with it, or was a minute ago (a server without "
                    "a guard says the same of a key that is not registered)"
                )
        # Flower ends a node in good order when the server does not take its signature.
        if self._code == "UNAUTHENTICATED":
            unknown = self._words in _NOT_REGISTERED
            if not connected:
                why = "it is not registered there (blackthorn register NAME)"
                return self._refused(why if unknown else self._words)
            why = "its key was unregistered there" if unknown else self._words
            return f"{self._settings.server} has sent this client away: {why}"
        if connected and self._code not in ("", "UNAVAILABLE"):
            return (
                f"{self._settings.server} failed in a call ({self._code}: {self._words}); its "
                "operator finds more in state/logs"
            )
        if connected and status == 0:
            return "somebody stopped the SuperNode"
        return describe_exit("supernode", status, tail)

    def _raise_if_hopeless(self) -> None:
        if self._code == "UNIMPLEMENTED":
            raise Refused(
                f"{self._settings.server} is not the clients' port of a blackthorn server (9092 by "
                "default): give it with --server NAME:PORT"
            )
        if self._complaint == _NO_KEY:
            raise Refused(
                f"{self._settings.server} takes registered clients only: give --key FILE, and have "
                "its public key registered there (blackthorn register)"
            )
        if self._complaint == _KEY_UNREADABLE:
            raise Refused(
                f"--key {self._settings.key} is not a private key that Flower takes: make one with "
                "blackthorn certs DIR --client NAME"
            )

    def _refused(self, why: str) -> str:
        """What to say of a refused key: something only once. Raises Refused after `patience`."""
        reason = f"{self._settings.server} refused the key {self._settings.key}: {why}"
        now = time.monotonic()
        first = self._refused_since is None
        since = self._refused_since = self._refused_since or now
        if now - since >= self._settings.patience:
            raise Refused(reason)
        patience = self._settings.patience
        return f"{reason}; it is tried again for {patience:g} s (--patience)" if first else ""
