"""`blackthorn audit`: whether a recipe's privacy claim survives an empirical check."""

import logging

from rich.console import Console

from blackthorn.launch.commands.progress import step_progress
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.rounding import downward, exact, upward
from blackthorn.simulation.privacy_audit import AuditResult
from blackthorn.simulation.privacy_audit import audit as run_audit

_DIGITS = 4


def audit(config: RunConfig, canaries: int, runs: int, console: Console) -> AuditResult:
    """Audit, telling the console how far it is."""
    # An absent canary is missing among the clients, on purpose.
    logging.getLogger("blackthorn").setLevel(logging.ERROR)
    with step_progress(console, "audit") as advance:
        try:
            return run_audit(config, canaries=canaries, runs=runs, advance=advance)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def audit_report(result: AuditResult) -> str:
    """The figures in words: what is claimed rounded up, what was found rounded down."""
    lines = []
    for finding in result.findings:
        attack = finding.attack[0].upper() + finding.attack[1:]
        lines.append(f"{attack}, delta = {exact(finding.delta)}:")
        lines.append(_figure("claimed", upward(finding.claimed, _DIGITS)))
        if finding.estimate is not None:
            lines.append(_figure("estimate", f"{finding.estimate:.{_DIGITS}g}"))
        lines.append(_figure("at least", downward(finding.found, _DIGITS)))
    error = f"{100 * (1 - result.confidence):.2g} %"
    lines.append(f"Together the lower bounds are wrong with probability {error} at most.")
    if result.refuted:
        verdict = f"REFUTED (as a true one is with probability {error} at most: repeat the audit)"
    else:
        verdict = "not refuted (which proves nothing)"
    return "\n".join([*lines, f"The claim is {verdict}."])


def _figure(name: str, epsilon: str) -> str:
    return f"  {name + ' epsilon':<20}{epsilon:>10}"
