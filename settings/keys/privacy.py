"""Privacy of clients and of single examples: the budget, the noise, and what is claimed."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.declaration import BY_ALGORITHM, PLACE, SERVER, KeyGroup, by

# Beyond, epsilon's arithmetic overflows.
MOST_NOISE = 1e12


class Privacy(KeyGroup):
    """What is noised, charged and claimed."""

    # Client-level privacy (dp-fedavg, dp-normfedavg, and ce-fedavg with noise).
    epsilon: float = Field(
        0.0, ge=0, description="Budget of the whole run; the noise is calibrated to it. 0: none."
    )
    delta: Annotated[float, by("noise", True), by("local-dp-sgd", True)] = Field(
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
    accountant: Annotated[Literal["rdp", "prv", "pld"], by("noise", True)] = Field(
        "rdp", description="Who computes epsilon; prv and pld are tighter and slower."
    )
    neighbours: Annotated[
        Literal["auto", "add-remove", "zero-out", "replace-one"], by("noise", True)
    ] = Field(
        "auto",
        description="Whose influence is bounded; auto: add-remove for poisson, zero-out for fixed "
        "and full.",
    )
    banded_noise: Annotated[bool, SERVER, by("participation", "rotating")] = Field(
        True,
        description="A round's noise takes back some of that of the bands - 1 rounds before; "
        "false: every round's is drawn anew.",
    )
    noise_location: Annotated[Literal["server", "client"], by("noise", True)] = Field(
        "server", description="Who draws the noise; client: every invited client its share."
    )
    noise_top_up: Annotated[bool, by("noise-location", "client")] = Field(
        True,
        description="The server adds the shares of those that failed and one of its own; "
        "false claims nothing.",
    )
    # Secure aggregation (secure-dp-fedavg).
    secure_bits: Annotated[int, BY_ALGORITHM] = Field(
        16, ge=8, le=32, description="k: clients' integers are summed modulo 2^k."
    )
    secure_dropouts: Annotated[float, BY_ALGORITHM] = Field(
        0.2,
        ge=0,
        lt=0.5,
        description="Share of a round's clients that may vanish; the noise is enough without them.",
    )
    secure_server: Annotated[Literal["malicious", "semi-honest"], BY_ALGORITHM] = Field(
        "malicious",
        description="malicious: shares of two thirds of the clients open a secret, so that a "
        "server that lies about who vanished learns no update; semi-honest: of half.",
    )
    denominator: Annotated[Literal["fixed", "replies"], by("noise", True)] = Field(
        "fixed",
        description="What a noised sum is divided by: r, fixed beforehand; or, where nothing is "
        "claimed, the number of replies (Zhang et al.).",
    )
    max_epsilon: float = Field(
        0.0, ge=0, description="The run ends before the round that would pass it; 0: no limit."
    )
    claim_privacy: Annotated[bool, by("noise", True), by("local-dp-sgd", True)] = Field(
        True, description="false: run what the claim would forbid, and report no figure."
    )
    clip_norm_from_data: Annotated[bool, by("noise", True)] = Field(
        False, description="clip-norm was read off the clients' data: the claim then says so."
    )
    insecure_seeded_noise: Annotated[bool, by("noise", True), by("local-dp-sgd", True)] = Field(
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
    dp_sgd_sample_rate: Annotated[float, by("local-dp-sgd", True)] = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability with which an example is in a step's batch; the "
        "noised sum is divided by batch-size. Both fixed beforehand, never by what a client has.",
    )
    dp_sgd_noise_multiplier: Annotated[float, by("local-dp-sgd", True)] = Field(
        1.0,
        gt=0,
        le=MOST_NOISE,
        description="Noise of a step, in multiples of dp-sgd-clip-norm.",
    )
    dp_sgd_clip_norm: Annotated[float, by("local-dp-sgd", True)] = Field(
        1.0, ge=1e-12, le=1e12, description="Longest gradient of one example."
    )
