"""How far FA-LD's chain was from the posterior, held against Theorems 5.7 to 5.10."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from blackthorn.experiments.exact_distance import (
    DRAWS,
    HETEROGENEITIES,
    LOCAL_STEPS,
    RHOS,
    ROUNDED,
    SETTING,
    SHARE,
    STEPS,
    TINY,
)
from blackthorn.experiments.finding import Claim, Finding, between
from blackthorn.experiments.study import Numbers, Plot, Scale, Section, Table, Value
from blackthorn.reporting.figures import CYCLE, legend_above, new_figure


def section(numbers: Numbers, scale: Scale) -> Section:
    """Theorems 5.7 to 5.10 in exact numbers."""
    found = {str(label[0]): value for label, value in numbers.items()}
    texts = [
        "The paper has no experiments: its theorems are bounds. Here every number is exact, from "
        "the recursion of the chain's mean and covariance on Bayesian linear regression, where the "
        "posterior is known. With partial participation the law is a mixture of Gaussians, and W2 "
        "is that of the Gaussian with its moments.",
        "W2 is in the unit of the parameters θ.",
    ]
    return Section(
        [
            *step_size_claims(found["step size"]),
            local_steps_claim(found["local steps"]),
            heterogeneity_claim(found["heterogeneity"]),
            decaying_claim(found["decaying"]),
            *shared_noise_claims(found["shared noise"]),
            *participants_claims(found["participants"]),
        ],
        _tables(found),
        _plots(found),
        texts,
        {**SETTING, "participants": "with imbalance 0", "rounds": scale.choose(4000, 1000)},
    )


def slope(etas: Sequence[float], distances: Sequence[float]) -> float:
    """d ln W2 / d ln η over the smaller half of the step sizes."""
    half = len(etas) // 2
    return float(np.polyfit(np.log(etas[half:]), np.log(distances[half:]), 1)[0])


def step_size_claims(found: Value) -> list[Claim]:
    """Theorem 5.7 in η: a bound of order √η, and the measured order 1."""
    slopes = {k: slope(found["eta"], curve) for k, curve in found["w2"].items()}
    monotone = [
        Finding(
            f"K = {k}: W2 from the largest η to the smallest",
            f"{curve[0]:.4f} to {curve[-1]:.2g}",
            "falling throughout",
            all(a > b for a, b in itertools.pairwise(curve)),
        )
        for k, curve in found["w2"].items()
    ]
    return [
        Claim(
            "Theorem 5.7: W2 to the posterior vanishes with η, at least as fast as √η.",
            [
                *monotone,
                *(between(f"K = {k}: exponent of η", s, 0.5, math.inf) for k, s in slopes.items()),
            ],
        ),
        Claim(
            "On a Gaussian posterior with exact gradients it falls linearly in η.",
            [between(f"K = {k}: exponent of η", s, 0.9, 1.1) for k, s in slopes.items()],
            ours=True,
        ),
    ]


def local_steps_claim(found: Value) -> Claim:
    """Theorem 5.7 in K."""
    return Claim(
        "Theorem 5.7: W2 grows with the number of local steps K.",
        [_rising("W2", STEPS, found["w2"], "K")],
    )


def heterogeneity_claim(found: Value) -> Claim:
    """Theorem 5.7 in H_0."""
    medians = [float(np.median(own)) for own in found["w2"]]
    what = f"median of W2 over {len(found['w2'][0])} problems, K = {LOCAL_STEPS}"
    return Claim(
        "Theorem 5.7: W2 grows with the heterogeneity of the data.",
        [_rising(what, HETEROGENEITIES, medians, "h")],
    )


def _rising(what: str, places: Sequence[float], values: Sequence[float], name: str) -> Finding:
    said = ", ".join(f"{v:.3g} at {name} = {p:g}" for p, v in zip(places, values, strict=True))
    return Finding(
        *(what, said, "rising throughout"),
        all(a < b for a, b in itertools.pairwise(values)),
    )


def decaying_claim(found: Value) -> Claim:
    """Theorem 5.8: W2 ≤ C √η_k from early rounds on, and below what the fixed step leaves."""
    ratios = np.array(found["decaying"]) / np.sqrt(found["eta"])
    early = float(ratios[: len(ratios) // 10].max())
    late = float(ratios[-1])
    return Claim(
        "Theorem 5.8: with η_k = 1/(2L + mk/12) W2 falls at least as fast as √η_k.",
        [
            Finding(
                "W2/√η_k in the last round, over its largest in the first tenth",
                f"{late / early:.3g}",
                "below 1",
                late < early,
            ),
            Finding(
                "W2 in the last round, decaying and fixed",
                f"{found['decaying'][-1]:.4f} and {found['fixed'][-1]:.4f}",
                "decaying below fixed",
                found["decaying"][-1] < found["fixed"][-1],
            ),
        ],
    )


def shared_noise_claims(found: Value) -> list[Claim]:
    """Theorem 5.9, and the identity for identical clients."""
    curve, alike = found["w2"], found["alike"]
    falling = all(a >= b * (1 - ROUNDED) for a, b in itertools.pairwise(curve))
    spread = (max(alike) - min(alike)) / max(alike)
    return [
        Claim(
            "Theorem 5.9: with full participation more shared noise ρ never hurts.",
            [
                Finding(
                    "W2 at ρ = 0 and at ρ = 1",
                    f"{curve[0]:.5f} and {curve[-1]:.5f}",
                    "never rising with ρ",
                    falling,
                )
            ],
            note=f"The gain is {1 - curve[-1] / curve[0]:.2%}: with everybody taking part ρ hardly "
            "matters.",
        ),
        Claim(
            "For clients that all hold the same, W2 depends on neither ρ nor K.",
            [between("relative spread of W2 over ρ and K", spread, -math.inf, 1e-5)],
            ours=True,
        ),
    ]


def participants_claims(found: Value) -> list[Claim]:
    """Theorem 5.10: the bias of partial participation, its limit as η → 0, and ρ = 1."""
    tiny, usual = f"{TINY:g}", f"{SHARE:g}"
    falls, limits, vanish = [], [], []
    for scheme in ("I", "II"):
        curve = found["w2"][f"{scheme}/0/{usual}"]
        said = ", ".join(f"{v:.3f} at S = {s}" for s, v in zip(DRAWS, curve, strict=True))
        falling = all(a > b for a, b in itertools.pairwise(curve))
        falls.append(Finding(f"scheme {scheme}: W2", said, "falling throughout", falling))
        off = max(
            abs(w2 - limit) / max(found["limit"][scheme])
            for w2, limit in zip(
                found["w2"][f"{scheme}/0/{tiny}"], found["limit"][scheme], strict=True
            )
        )
        what = f"scheme {scheme}: largest distance from the limit, of its value at S = 1"
        limits.append(between(what, off, -math.inf, 0.01))
        left = max(found["w2"][f"{scheme}/1/{tiny}"]) / max(found["w2"][f"{scheme}/0/{tiny}"])
        what = f"scheme {scheme}: W2 at ρ = 1 over W2 at ρ = 0, η → 0"
        vanish.append(between(what, left, -math.inf, 0.01))
    pairs = zip(found["w2"][f"II/0/{usual}"], found["w2"][f"I/0/{usual}"], strict=True)
    pairs_differ = list(pairs)[1:]
    better = Finding(
        "scheme II below scheme I",
        f"at {sum(a < b for a, b in pairs_differ)} of {len(pairs_differ)} S above 1",
        "at every S above 1",
        all(a < b for a, b in pairs_differ),
    )
    at_all = found["w2"][f"II/0/{usual}"][-1]
    same = abs(at_all - found["full"][0]) <= 1e-6 * max(at_all, 1e-3)
    everybody = Finding(
        "scheme II with S = N, and full participation",
        f"{at_all:.6f} and {found['full'][0]:.6f}",
        "equal",
        same,
    )
    return [
        Claim("Theorem 5.10: the bias falls as more clients S take part.", falls),
        Claim(
            "Theorem 5.10: scheme II's bound is the better one, and S = N is full participation.",
            [better, everybody],
        ),
        Claim(
            "The bias does not vanish with η: it comes to (√(τ_eff/τ) − 1) √tr(τA⁻¹).",
            limits,
            ours=True,
            note="τ_eff/τ = ρ² + (1 − ρ²)N/S for scheme II, ρ² + (1 − ρ²)(1 + (N − 1)/S) for "
            "scheme I.",
        ),
        Claim("Theorem 5.10: at ρ = 1 it vanishes with η.", vanish),
    ]


def _tables(found: Mapping[str, Value]) -> list[Table]:
    steps = found["local steps"]["w2"]
    noise = found["shared noise"]["w2"]
    medians = [float(np.median(own)) for own in found["heterogeneity"]["w2"]]
    part = found["participants"]
    columns = [part["w2"][f"{scheme}/{rho}/{SHARE:g}"] for scheme in ("I", "II") for rho in (0, 1)]
    columns += [part["limit"][scheme] for scheme in ("I", "II")]
    rows = [[str(s), *(f"{own[i]:.4f}" for own in columns)] for i, s in enumerate(DRAWS)]
    heads = ["S", "I, ρ = 0", "I, ρ = 1", "II, ρ = 0", "II, ρ = 1"]
    heads += ["limit I, ρ = 0", "limit II, ρ = 0"]
    return [
        _row_table("W2 by local steps, η = 1/(16L)", "K", STEPS, steps),
        _row_table(f"W2 by shared noise, K = {LOCAL_STEPS}", "ρ", RHOS, noise),
        _row_table(
            f"Median of W2 by heterogeneity, K = {LOCAL_STEPS}", "h", HETEROGENEITIES, medians
        ),
        Table("W2 by participants of 10, K = 1, η = 1/(16L), and limits as η → 0", heads, rows),
    ]


def _row_table(caption: str, name: str, places: Sequence[float], values: Sequence[float]) -> Table:
    return Table(
        caption, [name, *(f"{p:g}" for p in places)], [["W2", *(f"{v:.5f}" for v in values)]]
    )


def _plots(found: Mapping[str, Value]) -> list[Plot]:
    return [
        _step_size_plot(found["step size"]),
        _line_plot("local-steps", "local steps K", STEPS, found["local steps"]["w2"]),
        _line_plot("shared-noise", "shared noise ρ (no unit)", RHOS, found["shared noise"]["w2"]),
        _heterogeneity_plot(found["heterogeneity"]["w2"]),
        _decaying_plot(found["decaying"]),
        _participants_plot(found["participants"]),
    ]


_W2 = "W2 to the posterior (unit of θ)"


def _step_size_plot(found: Value) -> Plot:
    figure = new_figure()
    axes = figure.add_subplot()
    for i, (k, curve) in enumerate(found["w2"].items()):
        axes.plot(found["eta"], curve, ("o-", "s--")[i], color=CYCLE[i], label=f"K = {k}")
    etas = np.array(found["eta"])
    guide = found["w2"]["1"][0] * (etas / etas[0]) ** 0.5
    axes.plot(etas, guide, ":", color="black", label="√η")
    axes.set(xscale="log", yscale="log", xlabel="step size η", ylabel=_W2)
    axes.grid(alpha=0.3)
    legend_above(axes)
    return Plot("step-size", "Theorem 5.7: W2 against the step size.", figure)


def _line_plot(name: str, label: str, places: Sequence[float], values: Sequence[float]) -> Plot:
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot(places, values, "o-", color=CYCLE[0])
    axes.set(xlabel=label, ylabel=_W2)
    axes.set_ylim(0, 1.15 * max(values))
    axes.grid(alpha=0.3)
    theorem = "5.7" if name == "local-steps" else "5.9"
    return Plot(name, f"Theorem {theorem}: W2 against {label}.", figure)


def _heterogeneity_plot(found: Sequence[Sequence[float]]) -> Plot:
    figure = new_figure()
    axes = figure.add_subplot()
    quartiles = np.quantile(found, [0.25, 0.5, 0.75], axis=1)
    axes.plot(HETEROGENEITIES, quartiles[1], "o-", color=CYCLE[0], label="median")
    axes.fill_between(
        HETEROGENEITIES, quartiles[0], quartiles[2], color=CYCLE[0], alpha=0.2, label="quartiles"
    )
    axes.set(xlabel="heterogeneity h (no unit)", ylabel=_W2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    legend_above(axes)
    caption = f"Theorem 5.7: W2 against the heterogeneity, {len(found[0])} problems."
    return Plot("heterogeneity", caption, figure)


def _decaying_plot(found: Value) -> Plot:
    figure = new_figure()
    axes = figure.add_subplot()
    rounds = range(1, len(found["eta"]) + 1)
    axes.plot(rounds, found["decaying"], color=CYCLE[0], label="decaying η_k")
    axes.plot(rounds, found["fixed"], "--", color=CYCLE[1], label="fixed η = 1/(2L)")
    axes.set(xscale="log", yscale="log", xlabel="communication round", ylabel=_W2)
    axes.grid(alpha=0.3)
    legend_above(axes)
    return Plot("decaying", "Theorem 5.8: W2 against rounds.", figure)


def _participants_plot(found: Value) -> Plot:
    figure = new_figure()
    axes = figure.add_subplot()
    for i, scheme in enumerate(("I", "II")):
        for rho, style in ((0, "o-"), (1, "s--")):
            curve = found["w2"][f"{scheme}/{rho}/{SHARE:g}"]
            axes.plot(DRAWS, curve, style, color=CYCLE[i], label=f"scheme {scheme}, ρ = {rho}")
        axes.plot(
            *(DRAWS, found["limit"][scheme], ":"), color=CYCLE[i], label=f"{scheme}, η → 0, ρ = 0"
        )
    axes.set(xlabel="clients taking part S, of 10", ylabel=_W2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    legend_above(axes)
    return Plot("participants", "Theorem 5.10: W2 against the participants.", figure)
