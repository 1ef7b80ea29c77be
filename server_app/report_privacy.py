"""What a run's ledger says was spent, round by round."""

from dataclasses import dataclass

from server_app.privacy import ledger_path
from server_app.run_record import RunRecord
from strategies.accounting import spent
from strategies.ledger import read_charges
from strategies.release import first_rounds

_MOST_POINTS = 40
# The accountant of cohorts without replacement takes about a second for each figure.
_FEW_POINTS = 5


@dataclass(frozen=True)
class Spent:
    """`points`: (rounds charged, ε by RDP) at `delta`; `rounds_before` were earlier runs'."""

    points: list[tuple[int, float]]
    delta: float
    rounds_before: int


def spent_by_round(record: RunRecord) -> Spent | None:
    """The ledger's charges as a curve; None for a run without a central claim or a ledger."""
    config = record.config
    privacy = (record.summary or {}).get("privacy") or {}
    path = None if config is None else ledger_path(config, record.folder)
    if config is None or path is None or not path.is_file():
        return None
    charges = read_charges(path)
    total = sum(count for _, count in charges)
    before = int(privacy.get("rounds_of_earlier_runs") or 0)
    drawn = any(release.drawn is not None for release, _ in charges)
    points = []
    for rounds in _spread(total, _FEW_POINTS if drawn else _MOST_POINTS):
        epsilon = spent(first_rounds(charges, rounds), config.delta, "rdp").epsilon
        if epsilon < float("inf"):
            points.append((rounds, epsilon))
    return Spent(points, config.delta, before) if points else None


def _spread(total: int, most: int) -> list[int]:
    """Up to `most` numbers from 1 to `total`, both included, evenly spread."""
    if total <= most:
        return list(range(1, total + 1))
    return sorted({1 + round(i * (total - 1) / (most - 1)) for i in range(most)})
