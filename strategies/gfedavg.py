"""Generalised FedAvg (Yang et al., Algorithm 1): two learning rates, uniform weights."""

from .base import FederatedStrategy


class GFedAvg(FederatedStrategy):
    """w ← w − η_g η_l (1/|S_t|) Σ u_i. With η_g = 1 this is FedAvg with uniform weights.

    Takes the options of StrategyOptions.
    """
