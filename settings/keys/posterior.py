"""Posterior sampling (fa-ld)."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.declaration import SERVER, KeyGroup


class Posterior(KeyGroup):
    """How the posterior is sampled, and which samples are kept."""

    temperature: float = Field(1.0, ge=0, description="fa-ld: tau, 1 for the posterior itself.")
    shared_noise: float = Field(
        0.0, ge=0, le=1, description="fa-ld: rho, the part of the noise that all clients share."
    )
    prior_precision: float = Field(
        0.0, ge=0, description="fa-ld: precision of the Gaussian prior of mean 0; 0: flat."
    )
    step_size: Literal["fixed", "decaying"] = Field(
        "fixed",
        description="fa-ld: the step size is local-lr, or 1/(1/local-lr + strong-convexity k/12) "
        "at local step k (local-lr = 1/(2L), L the smoothness of the energy).",
    )
    burn_in: int = Field(0, ge=0, description="fa-ld: rounds before the first posterior sample.")
    thinning: int = Field(
        1, ge=1, description="fa-ld: rounds from one posterior sample to the next."
    )
    max_samples: Annotated[int, SERVER] = Field(
        1000, ge=1, description="fa-ld: most posterior samples kept on disk."
    )
    keep_samples: Annotated[Literal["last", "reservoir"], SERVER] = Field(
        "last",
        description="fa-ld: which are kept when there are more: the last, or a uniform choice.",
    )
    langevin_seed: int = Field(
        -1,
        ge=-1,
        le=2**32 - 1,
        description="fa-ld: seed of the noise, for tests; -1: the operating system's entropy.",
    )
