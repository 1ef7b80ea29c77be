"""The client's part of a bound on its update; the server enforces it again."""

import torch

from server_app.config import RunConfig, clip_units
from server_app.privacy_checks import PRIVATE_ALGORITHMS
from strategies.bounding import clip, normalize, row_norms
from strategies.update_clipping import ClipNorm

CLIPS_UPDATES = ("fat-clipping-pr", "ce-fedavg")


def bounded_models(
    config: RunConfig, start: torch.Tensor, params: torch.Tensor, local_lr: float
) -> torch.Tensor:
    """Models [B, d] whose updates from `start` [d] an honest client of the algorithm sends.

    FAT-Clipping-PR, CE-FedAvg and DP-FedAvg: w − η_l clip((w − w_i)/η_l, C). DP-NormFedAvg: the
    same with norm(·, C). Model clipping: clip(w_i, c). All others send what they trained.
    """
    if config.algorithm == "model-clipping":
        return clip(params, config.clip_norm)
    if config.algorithm not in (*CLIPS_UPDATES, *PRIVATE_ALGORITHMS):
        return params
    bound = ClipNorm(config.clip_norm, clip_units(config)).in_gradient_units(local_lr)
    constrain = normalize if config.algorithm == "dp-normfedavg" else clip
    return start - constrain(start - params, local_lr * bound)


def unclipped_norms(
    config: RunConfig, start: torch.Tensor, params: torch.Tensor, local_lr: float
) -> list[float | None]:
    """‖u_i‖ in gradient units of the B clients' models, before they clip; None if they do not."""
    if config.algorithm not in CLIPS_UPDATES or not config.instruments:
        return [None] * len(params)
    return (row_norms(start - params) / local_lr).tolist()


def step_clip_norm(config: RunConfig, local_lr: float) -> float:
    """λ of FAT-Clipping-PI in gradient units; 0 (no clipping) for all others."""
    if config.algorithm != "fat-clipping-pi":
        return 0.0
    return ClipNorm(config.clip_norm, clip_units(config)).in_gradient_units(local_lr)
