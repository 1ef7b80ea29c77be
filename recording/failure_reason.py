"""What a summary says of a failure, and of places on this machine: it is released.

Under a claim of the clients' privacy an exception's text may say who answered, or how many: what is
said then is what is made of configuration alone, and of all else its kind.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blackthorn.attacks.registry import OwnAttackFailed
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.privacy_checks import claims_privacy
from blackthorn.strategies import NotEnoughClients
from blackthorn.strategies.ledger import LedgerInUse
from blackthorn.strategies.run_state import NotEnoughReplies

# An absolute path, and the name at its end. (What is behind a bracket is a quotient.)
_PATH = re.compile(r"(?<![\w/.:<)])/(?:[^\s/:;,'\"()<>]+/)*([^\s/:;,'\"()<>]+)")


class RunFailed(RuntimeError):
    """The run did not do what it was started for; the message says why, in one line."""


def reason_of(error: BaseException, config: RunConfig) -> str:
    """Why a run failed, as its summary may say it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        return "terminated"
    ours = isinstance(error, LedgerInUse | ConfigError | RunFailed)
    if not claims_privacy(config):
        ours = ours or isinstance(error, NotEnoughClients | NotEnoughReplies | ValueError)
        return str(error) if ours else f"{type(error).__name__}: {error}"
    if ours and not isinstance(error.__cause__, OwnAttackFailed):
        return str(error)
    if isinstance(error, NotEnoughClients):
        return "too few clients connected; who is missing is the operator's to know"
    return withheld(type(error).__name__)


def withheld(kind: str) -> str:
    """In the place of a text that is not known to say nothing of clients."""
    return f"{kind}; what it says is the operator's to know: it is in the run's output or its logs"


def without_places(summary: Mapping[str, Any], folder: Path, config: RunConfig) -> dict[str, Any]:
    """The summary of the run in `folder` with files by their names in the run folder, or by their
    own, in the place of absolute paths, which say whose machine it was."""
    told = dict(summary)
    known = [folder.resolve(), folder.absolute(), Path(config.ledger), Path(config.data_dir)]

    def named(text: str) -> str:
        for place in known:
            if place.is_absolute():
                text = text.replace(f"{place}/", "").replace(str(place), place.name)
        return _PATH.sub(r"\1", text)

    if "reason" in told:
        told["reason"] = named(told["reason"])
    told["warnings"] = [named(line) for line in told["warnings"]]
    if told.get("privacy"):
        told["privacy"] = {**told["privacy"], "claim": named(told["privacy"]["claim"])}
    return told
