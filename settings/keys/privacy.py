"""Privacy of clients and of single examples: the budget, the noise, and what is claimed."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.declaration import PLACE, SERVER, KeyGroup

# Beyond, epsilon's arithmetic overflows.
MOST_NOISE = 1e12


class Privacy(KeyGroup):
    """What is noised, charged and claimed."""

    # Client-level privacy (dp-fedavg, dp-normfedavg, and ce-fedavg with noise).
    epsilon: float = Field(
        0.0, ge=0, description="Budget of the whole run; the noise is calibrated to it. 0: none."
    )
    delta: float = Field(
        1e-5,
        ge=1e-100,
        lt=1,
        description="delta of every (epsilon, delta); under a claim at most 1/num-clients.",
    )
    noise_multiplier: float = Field(
        0.0,
        ge=0,
        le=MOST_NOISE,
        description="z: the noise of a round's sum is N(0, (z clip-norm)^2); or epsilon.",
    )
    accountant: Literal["rdp", "prv", "pld"] = Field(
        "rdp", description="Who computes epsilon; prv and pld are tighter and slower."
    )
    neighbours: Literal["auto", "add-remove", "zero-out", "replace-one"] = Field(
        "auto",
        description="Whose influence is bounded; auto: add-remove for poisson, zero-out for fixed "
        "and full.",
    )
    noise_location: Literal["server", "client"] = Field(
        "server", description="Who draws the noise; client: every invited client its share."
    )
    noise_top_up: bool = Field(
        True,
        description="noise at the clients: the server adds the share of those that failed; false "
        "claims nothing.",
    )
    max_epsilon: float = Field(
        0.0, ge=0, description="The run ends before the round that would pass it; 0: no limit."
    )
    claim_privacy: bool = Field(
        True, description="false: run what the claim would forbid, and report no figure."
    )
    clip_norm_from_data: bool = Field(
        False, description="clip-norm was read off the clients' data: the claim then says so."
    )
    insecure_seeded_noise: bool = Field(
        False, description="Cohorts and noise from the seed, for tests; drops the claim."
    )
    ledger: Annotated[str, SERVER, PLACE] = Field(
        "", description="File of the privacy ledger to continue; empty: ledger.json of the run."
    )

    # Sample-level privacy on every client.
    local_dp_sgd: bool = Field(
        False,
        description="Clients train by DP-SGD; epsilon for one of their examples is reported per "
        "client.",
    )
    dp_sgd_sample_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="local-dp-sgd: probability with which an example is in a step's batch; the "
        "noised sum is divided by batch-size. Both fixed beforehand, never by what a client has.",
    )
    dp_sgd_noise_multiplier: float = Field(
        1.0,
        gt=0,
        le=MOST_NOISE,
        description="local-dp-sgd: noise of a step, in multiples of dp-sgd-clip-norm.",
    )
    dp_sgd_clip_norm: float = Field(
        1.0, ge=1e-12, le=1e12, description="local-dp-sgd: longest gradient of one example."
    )
