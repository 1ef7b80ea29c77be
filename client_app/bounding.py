"""The client's part of a bound on its update; the server enforces it again."""

import torch

from blackthorn.settings.config import RunConfig
from blackthorn.strategies.bounding import clip, normalize, row_norms
from blackthorn.strategies.local_rule import (
    BOUND,
    CLIP_GRADIENT,
    CLIP_MODEL,
    CLIP_UPDATE,
    NORMALIZE_UPDATE,
    LocalRule,
)

CLIPS_UPDATES = ("fat-clipping-pr", "ce-fedavg")


def bounded_models(
    rule: LocalRule, start: torch.Tensor, params: torch.Tensor, local_lr: float
) -> torch.Tensor:
    """Models [B, d] whose updates from `start` [d] an honest client sends by the round's rule.

    "clip-update": w − η_l clip((w − w_i)/η_l, bound); "normalize-update": the same with
    norm(·, bound); "clip-model": clip(w_i, bound). By all others what was trained.
    """
    if rule.name == CLIP_MODEL:
        return clip(params, rule.numbers[BOUND])
    if rule.name not in (CLIP_UPDATE, NORMALIZE_UPDATE):
        return params
    return start - bounded_update(rule, start, params, local_lr)


def bounded_update(
    rule: LocalRule, start: torch.Tensor, params: torch.Tensor, local_lr: float
) -> torch.Tensor:
    """w − w_i [B, d], or [d], clipped or normalised to η_l times the rule's bound."""
    constrain = normalize if rule.name == NORMALIZE_UPDATE else clip
    return constrain(start - params, local_lr * rule.numbers[BOUND])


def unclipped_norms(
    config: RunConfig, start: torch.Tensor, params: torch.Tensor, local_lr: float
) -> list[float | None]:
    """‖u_i‖ in gradient units of the B clients' models, before they clip; None if they do not."""
    if config.algorithm not in CLIPS_UPDATES or not config.instruments:
        return [None] * len(params)
    return (row_norms(start - params) / local_lr).tolist()


def step_clip_norm(rule: LocalRule) -> float:
    """λ of "clip-gradient" in gradient units; 0 (no clipping) for all others."""
    return rule.numbers[BOUND] if rule.name == CLIP_GRADIENT else 0.0
