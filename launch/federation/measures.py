"""What /metrics of `blackthorn server` and `blackthorn client` shows, one row a measure.

The row also decides what is shown under a privacy claim; nothing else does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .certificates import expiry

# "over": of a run that is over. "no": not while any run of the server's is under a claim, as the
# number moves with who was asked, and who answered.
UnderClaim = Literal["yes", "over", "no"]


@dataclass(frozen=True)
class Measure:
    """A name, `gauge` or `counter`, what it says, its labels, and what a claim leaves of it."""

    name: str
    kind: Literal["gauge", "counter"]
    says: str
    labels: tuple[str, ...] = ()
    under_claim: UnderClaim = "yes"


INFO = Measure("blackthorn_info", "gauge", "1; the version and a digest of the code", ("code",))
CERTIFICATE = Measure(
    "blackthorn_certificate_days_left",
    "gauge",
    "days until a certificate expires, below 0 afterwards",
    ("file",),
)
READY = Measure("blackthorn_ready", "gauge", "1 where /healthz says ok, else 0")
NODES = Measure(
    "blackthorn_nodes",
    "gauge",
    "clients by state: online, offline, or registered and never seen",
    ("state",),
)
DATABASE = Measure(
    "blackthorn_database_bytes",
    "gauge",
    "size of superlink.db with its log, which grows with what clients send",
    under_claim="no",
)
REFUSALS = Measure(
    "blackthorn_guard_refusals",
    "counter",
    "requests that the guard refused since the server's SuperLink was started",
    ("key", "kind"),
    "no",
)
RUNS = Measure("blackthorn_runs", "gauge", "runs by state", ("state",))
STATE = Measure("blackthorn_run_state", "gauge", "1: the state a run is in", ("run", "state"))
PLANNED = Measure("blackthorn_run_rounds_planned", "gauge", "rounds that a run is to do", ("run",))
ROUNDS = Measure("blackthorn_run_rounds", "counter", "rounds that a run has done", ("run",), "over")
SKIPPED = Measure(
    "blackthorn_run_rounds_skipped",
    "counter",
    "rounds that left the model as it was",
    ("run",),
    "no",
)
SECONDS = Measure(
    "blackthorn_run_phase_seconds",
    "counter",
    "seconds that a run's rounds have spent in a phase",
    ("run", "phase"),
    "no",
)
REPLIES = Measure(
    "blackthorn_run_replies",
    "counter",
    "clients that were asked, by what became of it and by the class of the reason",
    ("run", "outcome", "reason"),
    "no",
)
EPSILON = Measure(
    "blackthorn_run_epsilon",
    "gauge",
    "what a run that is over has spent, of clients and of examples, as in its summary",
    ("run", "of"),
    "over",
)
CONNECTED = Measure("blackthorn_client_connected", "gauge", "1 while the server answers, else 0")

SERVER = (
    *(INFO, READY, NODES, CERTIFICATE, DATABASE, REFUSALS, RUNS),
    *(STATE, PLANNED, ROUNDS, SKIPPED, SECONDS, REPLIES, EPSILON),
)
CLIENT = (INFO, CONNECTED, CERTIFICATE)

# A measure, its labels' values, and its own.
Sample = tuple[Measure, tuple[str, ...], float]


def certificate_samples(*paths: Path) -> Iterator[Sample]:
    """How many days each certificate has left, by its file's name; none where there is none."""
    for path in paths:
        if (end := expiry(path)) is not None:
            left = end - datetime.now(UTC)
            yield CERTIFICATE, (path.name,), left / timedelta(days=1)


def families(samples: Iterable[Sample]) -> list[Metric]:
    """The samples as Prometheus has them."""
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for measure, labels, value in samples:
        if measure.name not in found:
            family = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
            found[measure.name] = family(measure.name, measure.says, labels=measure.labels)
        found[measure.name].add_metric(labels, value)
    return list(found.values())


def exposition(collector: Collector) -> bytes:
    """The text that Prometheus reads (text format 0.0.4)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def table(measures: Iterable[Measure]) -> list[str]:
    """The measures as lines of a Markdown table, for docs/operations.md."""
    shown = {"yes": "yes", "over": "once the run is over", "no": "no"}
    lines = ["| measure | what it says | under a claim |", "| --- | --- | --- |"]
    for one in measures:
        total = "_total" if one.kind == "counter" else ""
        labels = f"{{{','.join(one.labels)}}}" if one.labels else ""
        lines.append(f"| `{one.name}{total}{labels}` | {one.says} | {shown[one.under_claim]} |")
    return lines
