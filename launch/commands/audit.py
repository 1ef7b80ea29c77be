"""`blackthorn audit`: whether a recipe's privacy claim survives an empirical check."""

import logging

from rich.console import Console

from blackthorn.launch.commands.progress import step_progress
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.simulation.privacy_audit import AuditResult
from blackthorn.simulation.privacy_audit import audit as run_audit


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
    """The figures in words."""
    lines = []
    for finding in result.findings:
        attack = finding.attack[0].upper() + finding.attack[1:]
        lines += [f"{attack}, delta = {finding.delta:g}:", _figure("claimed", finding.claimed)]
        if finding.estimate is not None:
            lines.append(_figure("estimate", finding.estimate))
        lines.append(_figure("at least (95 %)", finding.found))
    verdict = "REFUTED" if result.refuted else "not refuted (which proves nothing)"
    return "\n".join([*lines, f"The claim is {verdict}."])


def _figure(name: str, epsilon: float) -> str:
    return f"  {name + ' epsilon':<26}{epsilon:10.3f}"
