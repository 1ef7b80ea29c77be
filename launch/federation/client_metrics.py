"""What `blackthorn client` shows of itself.

Nothing of rounds or replies: whether a client was drawn for one is, under a claim, nobody's to
know, and a client does not know what a run claims. What it has sent stands in its ledger.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from blackthorn.installation import CODE

from . import measures
from .measures import Sample


class ClientMetrics(Collector):
    """The measures of a client. `problem` says why its server cannot reach it, or nothing."""

    def __init__(self, ca: Path | None, problem: Callable[[], str]) -> None:
        self._ca = ca
        self._problem = problem

    def collect(self) -> list[Metric]:
        """All of it, as it is now."""
        return measures.families(self._samples())

    def _samples(self) -> Iterator[Sample]:
        yield measures.INFO, (CODE,), 1
        yield measures.CONNECTED, (), not self._problem()
        if self._ca is not None:
            yield from measures.certificate_samples(self._ca)
