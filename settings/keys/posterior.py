"""Posterior sampling (fa-ld, fsgld, sghmc, psgld)."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.declaration import BY_ALGORITHM, OF_A_CHAIN, SERVER, KeyGroup, by


class Posterior(KeyGroup):
    """How the posterior is sampled, and which samples are kept."""

    temperature: Annotated[float, BY_ALGORITHM] = Field(
        1.0, ge=0, description="tau, 1 for the posterior itself."
    )
    shared_noise: Annotated[float, BY_ALGORITHM] = Field(
        0.0, ge=0, le=1, description="rho, the part of the noise that all clients share."
    )
    prior_precision: Annotated[float, BY_ALGORITHM] = Field(
        0.0, ge=0, description="Precision of the Gaussian prior of mean 0; 0: flat."
    )
    step_size: Annotated[Literal["fixed", "decaying", "cyclical"], BY_ALGORITHM] = Field(
        "fixed",
        description="The step size is local-lr; decaying: 1/(1/local-lr + strong-convexity k/12) "
        "at local step k = 1, 2, ... (local-lr = 1/(2L), L the smoothness of the energy); "
        "cyclical: it falls by a cosine from local-lr to nearly 0 in every cycle-rounds rounds.",
    )
    cycle_rounds: Annotated[int, by("step-size", "cyclical")] = Field(
        0, ge=0, description="Rounds from one large step to the next, a sample at each cycle's end."
    )
    missing: Annotated[Literal["rescale", "skip"], SERVER, BY_ALGORITHM] = Field(
        "rescale",
        description="A client of the cohort that does not answer: the others stand in for it (a "
        "noisier sample, which is counted), or the round leaves the model as it was.",
    )
    chains: Annotated[int, SERVER, BY_ALGORITHM, OF_A_CHAIN] = Field(
        1,
        ge=1,
        le=64,
        description="Chains that blackthorn simulate runs, one after the other, each in a folder "
        "chain-1, chain-2, ... of output-dir, as chain = 1, 2, ...",
    )
    burn_in: Annotated[int, BY_ALGORITHM, OF_A_CHAIN] = Field(
        0, ge=0, description="Rounds before the first posterior sample."
    )
    thinning: Annotated[int, BY_ALGORITHM] = Field(
        1, ge=1, description="Rounds from one posterior sample to the next."
    )
    max_samples: Annotated[int, SERVER, BY_ALGORITHM, OF_A_CHAIN] = Field(
        1000, ge=1, description="Most posterior samples kept on disk."
    )
    keep_samples: Annotated[Literal["last", "reservoir"], SERVER, BY_ALGORITHM] = Field(
        "last",
        description="Which are kept when there are more: the last, or a uniform choice.",
    )
    langevin_seed: Annotated[int, BY_ALGORITHM, OF_A_CHAIN] = Field(
        -1,
        ge=-1,
        le=2**32 - 1,
        description="Seed of the noise, for tests; -1: the operating system's entropy.",
    )
