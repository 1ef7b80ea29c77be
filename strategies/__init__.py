"""Strategies for federated learning that survives the real world, and the functions they use."""

from .accounting import Figure, Release, calibrate_noise_multiplier, spent
from .aggregation import (
    Aggregate,
    bulyan,
    caf,
    centered_clipping,
    coordinate_median,
    geometric_median,
    krum,
    mda,
    mean,
    mean_around_median,
    monna,
    multi_krum,
    rage,
    smea,
    trimmed_mean,
)
from .aggregators import (
    Aggregator,
    Buckets,
    CorruptionBound,
    RageFilter,
    RobustRule,
    adaptive_clipping,
    nearest_neighbours,
    weighted_mean,
)
from .base import FederatedStrategy
from .biclip import BiClip, biclip
from .bounded_update import ClipNorm
from .bounding import NormBound, clip, normalize
from .clipping import CEFedAvg, FatClippingPI, FatClippingPR, ModelClipping
from .dp_fedavg import DPFedAvg, DPNormFedAvg
from .enrolment import NotEnoughClients
from .error_feedback import ErrorFeedback
from .fed_langevin import FedLangevin, Langevin
from .gfedavg import GFedAvg
from .global_model import ServerStep
from .learning_rate import LangevinRate, LocalRate
from .ledger import Ledger
from .local_rule import LocalRule
from .options import StrategyOptions
from .output_iterate import OutputIterate
from .participation import (
    CohortPlan,
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
)
from .privacy_plan import PrivacyPlan, calibrated
from .rage_local_sgd import Rage
from .reports import Rejection, RoundReport
from .rounds import RoundContext
from .schedules import ClippingSchedule, fat_clipping_schedule
from .shared_noise import shared_noise
from .tail_index import tail_index

__all__ = [
    "Aggregate",
    "Aggregator",
    "BiClip",
    "Buckets",
    "CEFedAvg",
    "ClipNorm",
    "ClippingSchedule",
    "CohortPlan",
    "CorruptionBound",
    "DPFedAvg",
    "DPNormFedAvg",
    "ErrorFeedback",
    "FatClippingPI",
    "FatClippingPR",
    "FedLangevin",
    "FederatedStrategy",
    "Figure",
    "FixedParticipation",
    "FullParticipation",
    "GFedAvg",
    "Langevin",
    "LangevinRate",
    "Ledger",
    "LocalRate",
    "LocalRule",
    "ModelClipping",
    "NormBound",
    "NotEnoughClients",
    "OutputIterate",
    "PoissonParticipation",
    "PrivacyPlan",
    "Rage",
    "RageFilter",
    "Rejection",
    "Release",
    "RobustRule",
    "RoundContext",
    "RoundReport",
    "ServerStep",
    "StrategyOptions",
    "adaptive_clipping",
    "biclip",
    "bulyan",
    "caf",
    "calibrate_noise_multiplier",
    "calibrated",
    "centered_clipping",
    "clip",
    "coordinate_median",
    "fat_clipping_schedule",
    "geometric_median",
    "krum",
    "mda",
    "mean",
    "mean_around_median",
    "monna",
    "multi_krum",
    "nearest_neighbours",
    "normalize",
    "rage",
    "shared_noise",
    "smea",
    "spent",
    "tail_index",
    "trimmed_mean",
    "weighted_mean",
]
