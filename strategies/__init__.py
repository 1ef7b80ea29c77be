"""Strategies for federated learning that survives the real world, and the functions they use."""

from .accounting import Figure, Release, calibrate_noise_multiplier, spent
from .aggregation import (
    Aggregate,
    Buckets,
    adaptive_clipping,
    bulyan,
    caf,
    centered_clipping,
    coordinate_median,
    equal_lengths,
    geometric_median,
    krum,
    mda,
    mean,
    mean_around_median,
    monna,
    multi_krum,
    nearest_neighbours,
    rage,
    smea,
    trimmed_mean,
)
from .aggregation.mean import weighted_mean
from .aggregators import (
    Aggregator,
    CorruptionBound,
    RageFilter,
    RobustRule,
)
from .base import FederatedStrategy
from .biclip import BiClip, biclip
from .bounding import ClipNorm, NormBound, clip, normalize
from .clipping import CEFedAvg, FatClippingPI, FatClippingPR, ModelClipping
from .conducive_langevin import ConduciveLangevin
from .enrolment import NotEnoughClients
from .error_feedback import ErrorFeedback
from .fed_langevin import FedLangevin, Langevin
from .fed_sghmc import FedSghmc
from .global_model import ServerStep
from .learning_rate import CyclicalRate, LangevinRate, LocalRate
from .ledger import Ledger
from .local_rule import LocalRule
from .local_sgd import GFedAvg, Rage
from .options import StrategyOptions
from .output_iterate import OutputIterate
from .participation import (
    CohortPlan,
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    RotatingParticipation,
)
from .preconditioned_langevin import PreconditionedLangevin
from .privacy_plan import PrivacyPlan, calibrated
from .private_averaging import DPFedAvg, DPNormFedAvg
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
    "ConduciveLangevin",
    "CorruptionBound",
    "CyclicalRate",
    "DPFedAvg",
    "DPNormFedAvg",
    "ErrorFeedback",
    "FatClippingPI",
    "FatClippingPR",
    "FedLangevin",
    "FedSghmc",
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
    "PreconditionedLangevin",
    "PrivacyPlan",
    "Rage",
    "RageFilter",
    "Rejection",
    "Release",
    "RobustRule",
    "RotatingParticipation",
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
    "equal_lengths",
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
