"""What a round releases, as inert data: accountants interpret it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

# From the most closed to the least.
Link = Literal["apart", "unknown", "open", "plain"]
# Over these others saw what a client sent.
SEEN: tuple[Link, ...] = ("open", "plain")

# What no ledger takes for a run's: more rounds or clients, or a lower rate.
MOST = 10**12
LEAST_RATE = 2.0**-53
# Beyond, epsilon's arithmetic overflows.
LARGEST_MULTIPLIER = 1e12


def whole(name: str, value: object) -> int:
    """`value` as Python's int, for files and arithmetic, of NumPy's kinds too.

    Raises ValueError, one line, for what is no integer, or not from 1 to 10^12.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= MOST:
        return int(value)
    raise ValueError(f"{name} = {value!r:.40} is not allowed: an integer from 1 to {MOST:g}")


def integer(name: str, value: object) -> int:
    """`value` as Python's int, of NumPy's kinds too. Raises ValueError, one line, for what is no
    integer."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise ValueError(f"{name} = {value!r:.40} is not allowed: an integer")


def real(name: str, value: object) -> float:
    """`value` as Python's float, of NumPy's kinds too. Raises ValueError, one line, for what is no
    number."""
    if isinstance(value, Real) and not isinstance(value, bool) and value == value:
        return float(value)
    raise ValueError(f"{name} = {value!r:.40} is not allowed: a number")


def take_over(one: object, kind: Callable[[str, Any], object], *names: str, **told: str) -> None:
    """Put what is in fields of the frozen `one` in its place as `kind` gives it, as Python's own
    numbers: one of a class of somebody's may be another whenever it is asked. `told`: fields that
    go by another name. Raises what `kind` raises."""
    for name in (*names, *told):
        object.__setattr__(one, name, kind(told.get(name, name), getattr(one, name)))


def check_colluding(colluding: object, num_clients: int) -> None:
    """Raises ValueError, one line, unless it is an integer from 0 to m − 1."""
    if not isinstance(colluding, int) or not 0 <= colluding < num_clients:
        raise ValueError(
            f"colluding = {colluding} is not allowed: an integer from 0 to {num_clients - 1}, the "
            "other clients"
        )


@dataclass(frozen=True)
class Release:
    """One noised sum: N(0, (z S)² I) on a sum that neighbouring populations move by at most S.

    `noise_multiplier` z is relative to that sensitivity S. `sample_rate` q: each client joined on
    its own with probability q (neighbours: one client added or removed). `drawn` = (n, m): n of m
    clients were drawn without replacement (neighbours: one client replaced by another). With
    q = 1 and nothing drawn there is no amplification by sampling. `shares` = s: the noise is of s
    shares that clients drew, each of whom knows its own; None: they drew none; "unknown": an
    earlier version left it out of its ledger, and they may have. `link`: whether what stands
    between server and clients keeps from each what another sends ("apart"), or does not ("open": a
    SuperLink without Blackthorn's guard; "plain": a port without TLS that others reach, at which
    whoever is on the way reads it); "unknown": an earlier version did not ask. `groups` = b:
    clients take turns in b groups, so that of n such releases of a run one after the other a client
    is in ⌈n/b⌉ at most, and these are charged. `concentrated`: the noise is not Gaussian, and no
    more is known of it than that it is ½/z²-concentrated differentially private, which RDP takes
    alone.

    Raises ValueError for values out of range.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    drawn: tuple[int, int] | None = None
    shares: int | Literal["unknown"] | None = None
    link: Link = "apart"
    groups: int = 1
    concentrated: bool = False

    @property
    def covers_clients(self) -> bool:
        """Whether the clients beside the one know no more than everybody: not their shares of the
        noise, nor who of a cohort of fixed size is missing among them, nor what another sent."""
        if self.link != "apart":
            return False
        return self.shares is None and (self.drawn is None or self.drawn[0] == self.drawn[1])

    def __post_init__(self) -> None:
        # Python's own numbers: accountants compute in the types that they are given, and remember
        # figures by values that are equal, of whatever type.
        take_over(self, real, noise_multiplier="noise multiplier", sample_rate="sample rate")
        take_over(self, whole, "groups")
        if self.drawn is not None:
            take_over(self, _cohort, "drawn")
        if self.shares not in (None, "unknown"):
            take_over(self, whole, "shares")
        if not 0 <= self.noise_multiplier <= LARGEST_MULTIPLIER:
            raise ValueError(
                f"noise multiplier = {self.noise_multiplier} is not allowed: 0 to "
                f"{LARGEST_MULTIPLIER:g}"
            )
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample rate = {self.sample_rate} is not allowed: 0 to 1, not 0")
        if self.drawn is not None and self.drawn[0] > self.drawn[1]:
            raise ValueError(
                f"a cohort of {self.drawn[0]} of {self.drawn[1]} clients is not allowed: "
                "from 1 to all of them"
            )
        if self.groups > 1 and (self.sample_rate < 1 or self.drawn is not None):
            raise ValueError(
                f"groups = {self.groups} is not allowed with clients that are drawn: those that "
                "take turns are all asked"
            )


def _cohort(name: str, drawn: tuple[object, object]) -> tuple[int, int]:
    size, population = drawn
    return whole(f"clients {name}", size), whole("clients", population)


def message_release(noise_multiplier: float, shares: int) -> Release:
    """What one client's message, with one of s shares of the noise z, tells the server of all its
    data: it carries N(0, (z C)²/s I) and moves by up to 2 C, so that the multiplier is z/(2 √s)."""
    return Release(noise_multiplier / (2 * math.sqrt(shares)))


Charge = tuple[Release, int]
