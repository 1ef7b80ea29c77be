"""How likely a cohort drawn by chance holds more corrupt clients than its rule assumes."""

import math
from collections.abc import Callable

from blackthorn.settings.derived import expected_cohort, invited
from blackthorn.settings.keys import Keys
from blackthorn.settings.robustness_checks import assumed_corrupt, most_corrupt, rule_of

# Cohorts that are looked through for the smallest safe one; between two of them all are.
_COHORTS = 1000
# As CorruptionBound.among: 0.29 * 100 is 28.999999999999996 in binary.
_ROUNDING = 1e-9


def fixed_tail(population: int, corrupt: int, cohort: int, bound: int) -> float:
    """P[X > b], X the corrupt among `cohort` clients drawn without replacement: hypergeometric."""
    total = _log_comb(population, cohort)
    least, most = max(0, cohort + corrupt - population), min(corrupt, cohort)
    logs = (
        _log_comb(corrupt, x) + _log_comb(population - corrupt, cohort - x) - total
        for x in range(max(bound + 1, least), most + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def poisson_tail(population: int, corrupt: int, rate: float, bound: Callable[[int], int]) -> float:
    """P[X > b(M)], X ~ Binomial(`corrupt`, `rate`) the corrupt among the M that join, each by
    itself with probability `rate`; b(M) is what the rule assumes of M and does not fall with it."""
    honest = _binomial(population - corrupt, rate)
    below = [0.0]
    for mass in honest:
        below.append(below[-1] + mass)
    total, joined = 0.0, 0
    for found, mass in enumerate(_binomial(corrupt, rate)):
        # With so few honest ones beside them they are too many; the more corrupt, the more so.
        while joined <= population - corrupt and bound(found + joined) < found:
            joined += 1
        while joined > 0 and bound(found + joined - 1) >= found:
            joined -= 1
        total += mass * below[joined]
    return min(1.0, total)


def over_rounds(risk: float, rounds: int) -> float:
    """1 − (1 − risk)^rounds."""
    return 1.0 if risk >= 1 else -math.expm1(rounds * math.log1p(-risk))


def check_cohorts(config: Keys) -> None:
    """Raises ValueError, one line with what would be safe, where over all rounds of the run the
    probability that a cohort holds more corrupt clients than the rule assumes is above
    cohort-risk."""
    corrupt, cohort = corrupt_clients(config), expected_cohort(config)
    if corrupt == 0 or not is_drawn(config):
        return
    risk = _risk(config, cohort, None)
    whole = over_rounds(risk, config.num_server_rounds)
    if whole <= config.cohort_risk:
        return
    assumed = assumed_corrupt(config, cohort)
    raise ValueError(
        f"cohort-risk = {config.cohort_risk:g} is passed: with {corrupt} corrupt of num-clients = "
        f"{config.num_clients}, of {cohort} clients in a round more than the {assumed} that "
        f"{rule_of(config)} assumes are corrupt with probability {risk:.3g}, and {whole:.3g} in "
        f"one of {config.num_server_rounds} rounds; {_safe(config, cohort, assumed)}"
    )


def unknown_risk(config: Keys) -> str:
    """What to say where nothing tells how many of the population are corrupt; else empty."""
    if corrupt_clients(config) > 0 or config.corrupt_clients == 0 or not is_drawn(config):
        return ""
    assumed = assumed_corrupt(config, expected_cohort(config))
    return (
        f"how likely a round's cohort holds more than the {assumed} corrupt clients that "
        f"{rule_of(config)} assumes is not known: set corrupt-clients to how many of num-clients = "
        f"{config.num_clients} may be corrupt, or to 0"
    )


def corrupt_clients(config: Keys) -> int:
    """B, how many of the population are taken to be corrupt."""
    return config.num_byzantine if config.corrupt_clients < 0 else config.corrupt_clients


def is_drawn(config: Keys) -> bool:
    """Whether chance decides how many corrupt clients a rule meets that assumes some."""
    counts = rule_of(config) not in ("mean", "fltrust") or config.pre_aggregator != "none"
    drawn = config.participation in ("fixed", "poisson")
    return counts and drawn and assumed_corrupt(config, expected_cohort(config)) > 0


def _risk(config: Keys, cohort: int, share: float | None, bound: int | None = None) -> float:
    """In a round of `cohort` clients, or so many in the mean, of which `share` are assumed corrupt,
    or `bound`; without either by the configuration."""

    def assumed(clients: int) -> int:
        if bound is not None:
            return bound
        if share is not None:
            return int(share * clients + _ROUNDING)
        return assumed_corrupt(config, clients)

    population, corrupt = config.num_clients, corrupt_clients(config)
    if config.participation == "poisson":
        # Of a rate that is given, not of the whole number nearest to it.
        own = cohort == expected_cohort(config)
        rate = config.sample_rate if own else cohort / population
        return poisson_tail(population, corrupt, rate, assumed)
    # All the corrupt that are invited may be among the first that answer.
    asked = invited(config) if cohort == config.clients_per_round else cohort
    return fixed_tail(population, corrupt, min(asked, population), assumed(cohort))


def _safe(config: Keys, cohort: int, assumed: int) -> str:
    """The smallest cohort that is safe with the same share assumed, and the smallest safe b."""
    share = assumed / cohort
    clients = _smallest(cohort + 1, config.num_clients, lambda m: _holds(config, m, share, None))
    bound = _smallest(assumed + 1, cohort, lambda b: _holds(config, cohort, None, b))
    key = "sample-rate" if config.participation == "poisson" else "clients-per-round"
    number = clients and (clients / config.num_clients if key == "sample-rate" else clients)
    larger = (
        f"{key} = {number:g} is the least that is safe with {share:.3g} of them assumed corrupt"
        if number
        else f"no cohort is safe with {share:.3g} of it assumed corrupt"
    )
    most = most_corrupt(config, cohort)
    more = f"num-corrupt = {bound} the least that is safe among {cohort}"
    if bound is None:
        more = f"no num-corrupt is safe among {cohort}"
    elif bound > most:
        more += f", where {rule_of(config)} stands {most}"
    return f"{larger}, {more}"


def _holds(config: Keys, cohort: int, share: float | None, bound: int | None) -> bool:
    risk = _risk(config, cohort, share, bound)
    return over_rounds(risk, config.num_server_rounds) <= config.cohort_risk


def _smallest(first: int, last: int, holds: Callable[[int], bool]) -> int | None:
    step = max(1, (last - first) // _COHORTS)
    for found in [*range(first, last, step), last]:
        if first <= found <= last and holds(found):
            before = range(max(first, found - step + 1), found)
            return next((one for one in before if holds(one)), found)
    return None


def _binomial(count: int, rate: float) -> list[float]:
    if rate >= 1:
        return [0.0] * count + [1.0]
    logs = math.log(rate), math.log1p(-rate)
    return [
        math.exp(_log_comb(count, k) + k * logs[0] + (count - k) * logs[1])
        for k in range(count + 1)
    ]


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
