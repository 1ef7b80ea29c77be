"""What a person reads of a run's posterior samples."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blackthorn.reporting.report_facts import CALIBRATED

FIGURES = ("accuracy", "nll", "brier", "ece", "entropy")


def posterior_lines(posterior: Mapping[str, Any]) -> list[str]:
    """Lines for what summary.json says under "posterior"."""
    chains = f" of {posterior['chains']} chains" if "chains" in posterior else ""
    lines = [f"posterior: {posterior['samples']} samples{chains}"]
    if posterior.get("ess_min") is not None:
        lines[0] += f", smallest effective sample size {posterior['ess_min']:.0f}"
    if posterior.get("rhat_max") is not None:
        lines[0] += f", largest split-R-hat {posterior['rhat_max']:.3f}"
    if "mixing" in posterior:
        lines.append(posterior["mixing"])
    if posterior.get("samples_rescaled"):
        lines.append(
            f"{posterior['samples_rescaled']} of the samples have more noise: a client was missing "
            "in their round"
        )
    if "w2" in posterior:
        lines.append(f"2-Wasserstein distance to the exact posterior: {posterior['w2']:.4f}")
    if "posterior" in posterior:
        lines += calibration_table(
            {n: posterior[k] for n, k in CALIBRATED.items() if k in posterior}
        )
    return lines


def calibration_table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One line a row: accuracy, negative log-likelihood, Brier score, ECE, mean entropy."""
    return _table(rows, FIGURES)


def parts_table(score: str, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One line a row: the parts of its mean `score` (`reporting.calibration.Decomposition`)."""
    return _table(rows, next(iter(rows.values())), score)


def _table(
    rows: Mapping[str, Mapping[str, float]], heads: Iterable[str], corner: str = ""
) -> list[str]:
    first = max(16, *(len(name) + 2 for name in rows))
    widths = {head: max(10, len(head) + 2) for head in heads}
    lines = [f"{corner:{first}}" + "".join(f"{head:>{w}}" for head, w in widths.items())]
    for name, figures in rows.items():
        cells = [f"{figures[head]:{width}.4f}" for head, width in widths.items()]
        lines.append(f"{name:{first}}" + "".join(cells))
    return lines


def diagnosis_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a scalar: mean, deviation, effective sample sizes and split-R̂."""
    heads = f"{'mean':>12}{'deviation':>12}{'ess':>10}{'ess tail':>10}{'split-R-hat':>13}"
    lines = [f"{'':16}{heads}"]
    for row in rows:
        lines.append(
            f"{row['name']:16}{row['mean']:12.4g}{row['deviation']:12.4g}"
            f"{row['ess']:10.0f}{row['ess_tail']:10.0f}{row['rhat']:13.3f}"
        )
    return lines
