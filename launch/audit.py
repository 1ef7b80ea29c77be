"""`blackthorn audit`: whether a recipe's privacy claim survives an empirical check."""

import logging

from rich.console import Console

from launch.progress import step_progress
from server_app.config import ConfigError, RunConfig
from simulation.privacy_audit import AuditResult
from simulation.privacy_audit import audit as run_audit


def audit(config: RunConfig, canaries: int, runs: int, console: Console) -> AuditResult:
    """Audit, telling the console how far it is."""
    # An absent canary is missing among the clients, on purpose.
    logging.getLogger("blackthorn").setLevel(logging.ERROR)
    with step_progress(console, "audit") as advance:
        try:
            return run_audit(config, canaries=canaries, runs=runs, advance=advance)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def audit_report(config: RunConfig, result: AuditResult, canaries: int, runs: int) -> str:
    """The figures in words."""
    one = result.one_shot
    verdict = "REFUTED" if result.refuted else "not refuted (which proves nothing)"
    return "\n".join(
        [
            f"One run of {config.num_server_rounds} rounds with {canaries} canaries, "
            f"delta = {config.delta:g}:",
            f"  claimed epsilon               {result.claimed:10.3f}",
            f"  estimate                      {one.epsilon:10.3f}",
            f"  cautious estimate (95 %)      {one.epsilon_low:10.3f}",
            f"{runs} runs of {result.short_rounds} round(s) with one canary and {runs} without, "
            f"delta = {result.short_delta:g}:",
            f"  claimed epsilon               {result.short_claimed:10.3f}",
            f"  lower bound (95 %)            {result.short_bound:10.3f}",
            f"The claim is {verdict}.",
        ]
    )
