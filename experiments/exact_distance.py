"""How far FA-LD's chain is from the posterior, exactly (Deng et al., Theorems 5.7 to 5.10)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from blackthorn.experiments.gaussian_chain import (
    Energies,
    Moments,
    Participation,
    after_round,
    chain,
    energies,
    full,
    scheme_1,
    scheme_2,
    stationary,
)
from blackthorn.experiments.study import Cell, Context, Scale, Value
from blackthorn.reporting.posterior_diagnostics import gaussian_distance
from blackthorn.strategies.learning_rate import step_size
from blackthorn.tasks.bayes_linear import heterogeneous_clients

# Bayesian linear regression in three dimensions, ten clients of about 20 examples.
SETTING: dict[str, Any] = {
    "clients": 10,
    "examples": 20,
    "dimension": 3,
    "heterogeneity": 1.0,
    "imbalance": 0.6,
    "prior-precision": 1.0,
    "seed": 0,
}
BALANCED = {**SETTING, "imbalance": 0.0}
# η as a share of 1/(2L), the largest step size that the theorems allow.
HALVINGS = tuple(2.0**-i for i in range(10))
SHARE = 1 / 8
STEPS = (1, 2, 5, 10, 20, 50)
RHOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
HETEROGENEITIES = (0.0, 0.25, 0.5, 1.0, 2.0)
DRAWS = (1, 2, 3, 5, 7, 10)
TINY = 1e-5  # of 1/(2L): where the limit η → 0 is read off
LOCAL_STEPS = 10
STEPS_OF_A_ROUND = range(1, LOCAL_STEPS + 1)
ROUNDED = 1e-6


def cells(scale: Scale) -> list[Cell]:
    """A cell for every sweep; they take a second each at any scale."""
    sweeps: dict[str, tuple[Any, Mapping[str, Any]]] = {
        "step size": (by_step_size, {**SETTING, "shares": HALVINGS}),
        "local steps": (by_local_steps, {**SETTING, "steps": STEPS, "share": SHARE}),
        "shared noise": (by_shared_noise, {**SETTING, "rhos": RHOS, "share": SHARE}),
        "heterogeneity": (
            by_heterogeneity,
            {
                **BALANCED,
                "heterogeneities": HETEROGENEITIES,
                "share": SHARE,
                "problems": scale.seeds or 20,
            },
        ),
        "participants": (by_participants, {**BALANCED, "draws": DRAWS, "shares": (SHARE, TINY)}),
        "decaying": (by_rounds, {**SETTING, "rounds": scale.choose(4000, 1000)}),
    }
    return [Cell((name, 0), work, values) for name, (work, values) in sweeps.items()]


def energies_of(settings: Mapping[str, Any]) -> Energies:
    """The problem that the settings describe."""
    rows, targets = heterogeneous_clients(
        settings["clients"],
        settings["examples"],
        settings["dimension"],
        noise_scale=1.0,
        heterogeneity=settings["heterogeneity"],
        imbalance=settings["imbalance"],
        seed=settings["seed"],
    )
    return energies(rows, targets, settings["prior-precision"])


def distance(of: Moments, other: Moments) -> float:
    """W2 of the Gaussians with these moments."""
    return gaussian_distance(*(torch.from_numpy(part) for part in (*of, *other)))


def bias(
    of: Energies, share: float, steps: int, rho: float, participation: Participation | None = None
) -> float:
    """W2 of the stationary law to the posterior with η = share/(2L)."""
    eta = share / (2 * of.smoothness)
    taking_part = full(of.p) if participation is None else participation
    return distance(stationary(chain(of, [eta] * steps, rho, taking_part)), of.posterior)


def by_step_size(settings: Mapping[str, Any], context: Context) -> Value:
    """W2 by η, for one local step and for ten."""
    del context
    of = energies_of(settings)
    etas = [share / (2 * of.smoothness) for share in settings["shares"]]
    curves = {str(k): [bias(of, s, k, 0.0) for s in settings["shares"]] for k in (1, LOCAL_STEPS)}
    return {"eta": etas, "w2": curves}


def by_local_steps(settings: Mapping[str, Any], context: Context) -> Value:
    """W2 by K."""
    del context
    of = energies_of(settings)
    return {"w2": [bias(of, settings["share"], k, 0.0) for k in settings["steps"]]}


def by_shared_noise(settings: Mapping[str, Any], context: Context) -> Value:
    """W2 by ρ with full participation; and for clients that all hold the same, where the law
    depends on neither ρ nor K."""
    del context
    of = energies_of(settings)
    n = len(of.p)
    alike = Energies(np.repeat(of.a[:1], n, 0), np.repeat(of.b[:1], n, 0), np.full(n, 1 / n))
    share = settings["share"]
    return {
        "w2": [bias(of, share, LOCAL_STEPS, rho) for rho in settings["rhos"]],
        "alike": [bias(alike, share, k, rho) for rho in settings["rhos"] for k in (1, LOCAL_STEPS)],
    }


def by_heterogeneity(settings: Mapping[str, Any], context: Context) -> Value:
    """W2 by heterogeneity for ten local steps: over problems, [heterogeneities, problems]."""
    del context
    found = []
    for heterogeneity in settings["heterogeneities"]:
        own = [
            energies_of({**settings, "heterogeneity": heterogeneity, "seed": seed})
            for seed in range(settings["problems"])
        ]
        found.append([bias(of, settings["share"], LOCAL_STEPS, 0.0) for of in own])
    return {"w2": found}


def by_participants(settings: Mapping[str, Any], context: Context) -> Value:
    """W2 by S for both schemes, ρ = 0 and 1, two step sizes: key "scheme/ρ/share"; and "limit",
    (√(τ_eff/τ) − 1) √tr(A⁻¹) with τ_eff/τ = ρ² + (1 − ρ²) N/S, resp. 1 + (N − 1)/S."""
    del context
    of = energies_of(settings)
    n = len(of.p)
    width = math.sqrt(float(np.trace(of.posterior[1])))
    curves, limits = {}, {}
    for scheme in ("I", "II"):
        for rho in (0.0, 1.0):
            for share in settings["shares"]:
                curves[f"{scheme}/{rho:g}/{share:g}"] = [
                    bias(of, share, 1, rho, scheme_1(of.p, s) if scheme == "I" else scheme_2(n, s))
                    for s in settings["draws"]
                ]
        hotter = [1 + (n - 1) / s if scheme == "I" else n / s for s in settings["draws"]]
        limits[scheme] = [(math.sqrt(h) - 1) * width for h in hotter]
    whole = [bias(of, share, 1, 0.0) for share in settings["shares"]]
    return {"w2": curves, "limit": limits, "full": whole}


def by_rounds(settings: Mapping[str, Any], context: Context) -> Value:
    """W2 of θ after every round, from θ = (1, 1, 1): with η_k = 1/(2L + m k/12), k counted over
    local steps (Theorem 5.8), and with η fixed at 1/(2L)."""
    del context
    of = energies_of(settings)
    first, d = 1 / (2 * of.smoothness), of.b.shape[1]
    states = {"decaying": (np.ones(d), np.zeros((d, d)))}
    states["fixed"] = states["decaying"]
    curves: dict[str, list[float]] = {"decaying": [], "fixed": [], "eta": []}
    fixed = chain(of, [first] * LOCAL_STEPS, 0.0, full(of.p))
    for t in range(settings["rounds"]):
        etas = [step_size(first, of.convexity, t * LOCAL_STEPS + k) for k in STEPS_OF_A_ROUND]
        rounds = {"decaying": chain(of, etas, 0.0, full(of.p)), "fixed": fixed}
        for name, own in rounds.items():
            states[name] = after_round(own, *states[name])
            curves[name].append(distance(states[name], of.posterior))
        curves["eta"].append(etas[-1])
    return {name: [float(f"{v:.6g}") for v in curve] for name, curve in curves.items()}
