"""What a run has spent of its ledger, round by round, from what it may release."""

from dataclasses import dataclass

from blackthorn.recording.privacy import privacy_plan
from blackthorn.reporting.report_facts import is_number
from blackthorn.reporting.run_record import RunRecord
from blackthorn.strategies.accounting import spent

# The accountant of cohorts without replacement takes about a second for each figure.
_FEW_POINTS = 5


@dataclass(frozen=True)
class Spent:
    """`points`: (rounds charged, those of other runs before them included; ε by RDP) at `delta`."""

    points: list[tuple[int, float]]
    delta: float


def spent_by_round(record: RunRecord) -> Spent | None:
    """ε after every round, as its line says; None for a run without a central claim.

    The ledger is not read: what is there now may be another's, or hold what came later.
    """
    told = [(e.get("rounds_charged", 0), e.get("epsilon_rdp", "")) for e in record.entries]
    points = [(n, e) for n, e in told if is_number(n) and is_number(e)] or _drawn(record)
    return Spent(points, record.config.delta) if points and record.config else None


def _drawn(record: RunRecord) -> list[tuple[int, float]]:
    """Of cohorts drawn without replacement no line says it: of rounds that are all alike."""
    privacy = (record.summary or {}).get("privacy") or {}
    config = record.config
    if config is None or privacy.get("neighbours") != "replace-one":
        return []
    if privacy.get("rounds_of_earlier_runs") != 0:
        return []
    z = {"noise_multiplier": privacy["noise_multiplier"], "epsilon": 0.0}
    release = privacy_plan(config.model_copy(update=z)).release()
    rounds = _spread(privacy["rounds_charged"], _FEW_POINTS)
    return [(n, spent([(release, n)], config.delta, "rdp").epsilon) for n in rounds]


def _spread(total: int, most: int) -> list[int]:
    """Up to `most` numbers from 1 to `total`, both included, evenly spread."""
    if total <= most:
        return list(range(1, total + 1))
    return sorted({1 + round(i * (total - 1) / (most - 1)) for i in range(most)})
