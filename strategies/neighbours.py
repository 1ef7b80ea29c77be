"""Which neighbours, turns and thresholds a privacy plan may have together."""

from typing import Any, Protocol

from .participation import (
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    RotatingParticipation,
)


class Planned(Protocol):
    """What of a PrivacyPlan is looked at."""

    @property
    def participation(self) -> Any: ...  # noqa: D102
    @property
    def num_clients(self) -> int: ...  # noqa: D102
    @property
    def groups(self) -> int: ...  # noqa: D102
    @property
    def bands(self) -> int: ...  # noqa: D102
    @property
    def adaptive(self) -> object: ...  # noqa: D102
    @property
    def neighbours(self) -> str | None: ...  # noqa: D102
    @property
    def noise_location(self) -> str: ...  # noqa: D102


def check_neighbours(plan: Planned) -> None:
    """Raises ValueError, one line, where no accountant knows the neighbours that are asked for."""
    if isinstance(plan.participation, FixedParticipation):
        if plan.participation.size > plan.num_clients:
            raise ValueError(
                f"a cohort of {plan.participation.size} of {plan.num_clients} clients is not "
                "allowed: at most all of them"
            )
        allowed: tuple[str, ...] = ("zero-out", "replace-one")
    elif isinstance(plan.participation, PoissonParticipation):
        allowed = ("add-remove",)
    elif isinstance(plan.participation, FullParticipation | RotatingParticipation):
        allowed = ("zero-out", "replace-one", "add-remove")
    else:
        raise ValueError(f"no accountant knows the participation {plan.participation}")
    if plan.neighbours is not None and plan.neighbours not in allowed:
        raise ValueError(
            f"neighbours = {plan.neighbours} breaks the claim with this participation, whose "
            f"figure is for {' or '.join(allowed)}"
        )


def check_turns(plan: Planned) -> None:
    """Raises ValueError, one line, where clients cannot take turns, or C follow no updates, so."""
    if plan.bands > plan.groups:
        raise ValueError(
            f"bands = {plan.bands} is not allowed with {plan.groups} group(s) of clients: of "
            "rounds whose noise hangs together no client may be in two"
        )
    if plan.groups > plan.num_clients:
        raise ValueError(
            f"groups = {plan.groups} is not allowed: at most num_clients = {plan.num_clients}"
        )
    if plan.groups > 1 and plan.noise_location == "client":
        raise ValueError(
            "noise_location = client is not allowed with clients that take turns: the noise of "
            "a round takes back that of the rounds before, of which a client knows nothing; "
            "use server"
        )
    if plan.adaptive is not None and plan.noise_location == "client":
        raise ValueError(
            "noise_location = client is not allowed with an adaptive threshold: of noised "
            "updates nobody can count which were below it; use server"
        )
