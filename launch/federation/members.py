"""What the server and the clients of a federation are started with."""

from dataclasses import dataclass
from pathlib import Path

from blackthorn.settings.config import ConfigError

from .addresses import Address
from .service import say

# What runs in place of the server's code on a client with a policy.
OWN_CLIENTAPP = "blackthorn.client_app.clientapp:main"


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, and where it keeps what; no TLS where `certs` is None.

    Its health service has any free port where `health` is None. `web` is where /metrics and
    /healthz are, `web_wanted` whether somebody asked for just that.
    """

    host: str
    fleet: Address
    control: Address
    certs: Path | None
    state: Path
    resume: bool = True
    limits: tuple[str, ...] = ()
    health: Address | None = None
    web: Address | None = None
    web_wanted: bool = False


@dataclass(frozen=True)
class ClientSettings:
    """One client: where its server is, who it is, and what it learns from."""

    server: Address
    ca: Path | None
    key: Path | None
    client_id: int
    data: Path | None
    data_dir: Path | None
    policy: Path | None
    ledger: Path | None
    logs: Path
    patience: float
    program: str | None
    warm: bool
    # The client's own list of all members' public keys.
    members: Path | None = None
    # Of the ledger that is there when the client starts.
    ledger_id: str = ""
    # Where /metrics and /healthz are.
    web: Address | None = None


def check_safeguards(policy: Path | None, ledger: Path, data: Path | None) -> str:
    """Policy and ledger are good, all examples are what the policy says, and the ledger can be
    written: its id. Raises ConfigError."""
    from blackthorn.client_app.client_ledger import ClientLedger, LedgerUnusable
    from blackthorn.client_app.policy import check_own_data, read_policy

    if policy is not None and data is not None:
        check_own_data(read_policy(policy, str(data)), str(data))
    elif policy is not None:
        read_policy(policy)
    try:
        kept = ClientLedger(ledger)
        told = kept.begins_anew or kept.moved
        known = kept.change(lambda _: None).ledger
    except LedgerUnusable as error:
        raise ConfigError(f"--ledger: {error}") from error
    if told is not None:
        say(told)
    return known
