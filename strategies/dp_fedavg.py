"""DP-FedAvg with clipping (Das et al., Algorithm 1; Zhang et al., Algorithm 3)."""

from .private_averaging import PrivateAveraging


class DPFedAvg(PrivateAveraging):
    """w ← w − η_g η_l v, v ← β v + (1/r) [ Σ clip(u_i, C) + N(0, (z C)² I) ].

    In gradient units (Das et al.) or, with ClipNorm(c, "parameter"), in those of CE-FedAvg (Zhang
    et al.). Takes a PrivacyPlan, the path of the ledger, and the options of StrategyOptions.
    """
