"""When a run gives up: too few replies, too many rounds in a row."""

from .reports import RoundReport

_NAMED = 5


class NotEnoughReplies(RuntimeError):
    """Round after round had too few replies; the message says which, and why, in one line."""


class QuorumWatch:
    """Counts rounds below the quorum; `fail_after` (None: any number) in a row are too many.

    Raises ValueError for `fail_after` below 1.
    """

    def __init__(self, fail_after: int | None) -> None:
        if fail_after is not None and fail_after < 1:
            raise ValueError(f"fail_after = {fail_after} is not allowed: at least 1")
        self._fail_after = fail_after
        self.in_a_row = 0

    def count(self, report: RoundReport) -> None:
        """Look at a round."""
        self.in_a_row = self.in_a_row + 1 if report.below_quorum else 0

    def check(self, report: RoundReport) -> None:
        """Raises NotEnoughReplies where the round that was counted last is one too many."""
        if self._fail_after is not None and self.in_a_row >= self._fail_after:
            last = report.server_round
            raise NotEnoughReplies(
                f"too few replies in {self.in_a_row} rounds in a row, up to round {last}, which "
                f"had {report.skipped}: {_reasons(report)}"
            )


def _reasons(report: RoundReport) -> str:
    named = [f"client {r.client}: {r.reason}" for r in report.rejected[:_NAMED]]
    more = len(report.rejected) - len(named)
    if more > 0:
        named.append(f"and {more} more")
    return "; ".join(named) or f"{len(report.invited)} clients were invited"
