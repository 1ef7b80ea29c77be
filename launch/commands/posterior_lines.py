"""What a person reads of a run's posterior samples."""

from collections.abc import Mapping, Sequence
from typing import Any

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
        rows = {"posterior mean": posterior["posterior"], "point estimate": posterior["point"]}
        lines += calibration_table(rows)
    return lines


def calibration_table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One line a row: accuracy, negative log-likelihood, Brier score, ECE, mean entropy."""
    width = max(16, *(len(name) + 2 for name in rows))
    lines = [" " * width + "".join(f"{name:>10}" for name in FIGURES)]
    for name, figures in rows.items():
        cells = [f"{figures[figure]:10.4f}" for figure in FIGURES]
        lines.append(f"{name:{width}}" + "".join(cells))
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
