"""What a run counts, and how it says why nothing came of it."""

import torch

from blackthorn.recording.run_counts import Counts
from blackthorn.strategies.reports import Rejection, RoundReport


def skipped(rejected: list[Rejection], *, confidential: bool) -> RoundReport:
    return RoundReport(
        1,
        [3, 4],
        [],
        rejected,
        0.1,
        torch.zeros(1),
        skipped="0 replies, fewer than 1",
        confidential=confidential,
    )


REJECTED = [Rejection(3, "not finite"), Rejection(4, "late", replied=False)]


def test_a_skipped_round_names_the_first_rejection() -> None:
    counts = Counts()
    counts.add(skipped(REJECTED, confidential=False))
    assert counts.last_skip == "0 replies, fewer than 1; client 3 was rejected: not finite"


def test_a_skipped_round_without_a_rejection_names_none() -> None:
    counts = Counts()
    counts.add(skipped([], confidential=False))
    assert counts.last_skip == "0 replies, fewer than 1"


def test_under_a_privacy_claim_nobody_is_told_how_many_replies_there_were() -> None:
    counts = Counts()
    counts.add(skipped(REJECTED, confidential=True))
    assert counts.last_skip == "why is in the run folder's operator.jsonl alone"
