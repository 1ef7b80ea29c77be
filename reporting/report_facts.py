"""What a run's report says in figures and tables, as plain data for its page."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from blackthorn.recording.round_entries import metrics_of
from blackthorn.reporting.plots import PHASES
from blackthorn.reporting.run_record import RunRecord
from blackthorn.settings.config import RunConfig, to_mapping
from blackthorn.settings.privacy_checks import claims_privacy
from blackthorn.settings.rounding import downward, exact, upward

# Whose probabilities are compared, as a person reads it, by the keys of the summary's posterior.
CALIBRATED = {
    "posterior mean": "posterior",
    "point estimate": "point",
    "point estimate, tempered": "point_tempered",
}
_MOST_ROWS = 30
_LONGEST_REASON = 300
# Metrics beside accuracy and loss.
_MOST_TILES = 4


@dataclass(frozen=True)
class Tile:
    """One figure of the headline, with a note in small print."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as text, a row each, under a title; `left_out` rows did not fit."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left_out: int = 0


@dataclass(frozen=True)
class Setting:
    """A key of the configuration; `changed` where it is not the default."""

    key: str
    value: str
    default: str
    changed: bool
    help: str


def is_confidential(record: RunRecord) -> bool:
    """Whether a privacy claim keeps cohorts and times out of everything that is released."""
    return record.config is not None and claims_privacy(record.config)


def headline(record: RunRecord) -> list[Tile]:
    """The figures that a person looks for first."""
    summary = record.summary or {}
    tiles = _quality(record)
    done = summary.get("rounds_completed")
    if done is None:
        done = record.entries[-1]["round"] if record.entries else 0
    planned = record.values.get("num-server-rounds")
    skipped = summary.get("rounds_skipped") or sum("skipped" in e for e in record.entries)
    note = f"{skipped} left the model as it was" if skipped else ""
    tiles.append(Tile("rounds", f"{done} of {planned}" if planned else str(done), note))
    tiles += _spent(record)
    tiles += _clients(record)
    seconds = summary.get("wall_seconds")
    if seconds is not None:
        tiles.append(Tile("wall time", duration(seconds)))
    failed = summary.get("catastrophic_failure")
    if failed is not None:
        tiles.append(Tile("model lost in round", str(failed), "accuracy fell to that of guessing"))
    return tiles


def _quality(record: RunRecord) -> list[Tile]:
    evaluated = [entry for entry in record.entries if entry.get("evaluated_by")]
    final = (record.summary or {}).get("final") or (evaluated[-1] if evaluated else {})
    by = str(evaluated[-1]["evaluated_by"]) if evaluated else ""
    note = {"server": "on the server's test set", "clients": "mean over the clients"}.get(by, "")
    tiles = []
    if is_number(final.get("accuracy")):
        tiles.append(Tile("accuracy", f"{100 * final['accuracy']:.1f} %", note))
    if is_number(final.get("loss")):
        tiles.append(Tile("loss", f"{final['loss']:.4g}", note))
    elif evaluated and "loss" in final:
        tiles.append(Tile("loss", "not finite", note))
    others = [name for name in final if name not in ("accuracy", "loss")]
    if evaluated and others:
        known = metrics_of(evaluated[-1])
        tiles += [Tile(n, f"{final[n]:.4g}", note) for n in others[:_MOST_TILES] if n in known]
    return tiles


def _spent(record: RunRecord) -> list[Tile]:
    privacy: Any = record.figures.get("privacy")
    if not privacy:
        return []
    epsilon: Any = privacy.get("epsilon")
    if is_number(epsilon):
        note = f"δ = {exact(privacy['delta'])}, {privacy['accountant']}"
        return [Tile("privacy spent, ε", upward(epsilon), note)]
    # Of a copy without state and ledger, for example.
    told = [e for e in record.entries if is_number(e.get("epsilon_rdp"))]
    if record.summary is None and told:
        note = f"δ = {exact(privacy['delta'])}, rdp, by the line of round {told[-1]['round']}; a "
        note += "round that was under way is not in it"
        return [Tile("privacy spent, ε", upward(told[-1]["epsilon_rdp"]), note)]
    return [Tile("privacy spent, ε", "no figure")]


def _clients(record: RunRecord) -> list[Tile]:
    if is_confidential(record):
        return [Tile("clients", "not told", "the privacy claim covers who took part")]
    counts = (record.summary or {}).get("clients") or {
        "invited": sum(e.get("invited") or 0 for e in record.entries),
        "replied": sum(e.get("replied") or 0 for e in record.entries),
        "rejected": sum(len(e.get("rejected") or []) for e in record.entries),
    }
    note = f"{counts['rejected']} rejected, of {counts['invited']} invited, over all rounds"
    return [Tile("replies accepted", str(counts["replied"]), note)]


def rejections(record: RunRecord) -> Table | None:
    """Why replies did not count: the reason, how often, and whose."""
    if is_confidential(record):
        return None
    clients: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in record.entries:
        for item in entry.get("rejected") or []:
            clients[str(item["reason"])][str(item["client"])] += 1
    ordered = sorted(clients.items(), key=lambda pair: -pair[1].total())
    rows = [(_shortened(reason), str(whose.total()), _ids(whose)) for reason, whose in ordered]
    return _table("Replies that did not count", ("reason", "times", "clients"), rows)


def refusals(record: RunRecord) -> Table | None:
    """What the SuperLink did not let through: of whose key, what the last time, and how often."""
    if is_confidential(record):
        return None
    counts: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], str] = {}
    for entry in record.entries:
        for item in entry.get("refused") or []:
            # What differs from one request to the next are its numbers.
            kind = str(item["key"]), re.sub(r"\d+", "N", str(item["what"]))
            counts[kind] += int(item["count"])
            last[kind] = str(item["what"]) + ("; it is barred" if item["barred"] else "")
    rows = [
        (key, _shortened(last[key, what]), str(count))
        for (key, what), count in counts.most_common()
    ]
    return _table("Requests that the SuperLink refused", ("key", "what", "times"), rows)


def skips(record: RunRecord) -> Table | None:
    """Rounds that left the model as it was."""
    rows = [
        (str(entry["round"]), _shortened(str(entry["skipped"])))
        for entry in record.entries
        if entry.get("skipped") and not is_confidential(record)
    ]
    return _table("Rounds that left the model as it was", ("round", "reason"), rows)


def filtered(record: RunRecord) -> Table | None:
    """Whom the aggregation rule left out, in how many of the rounds in which they counted."""
    if is_confidential(record):
        return None
    rounds: dict[int, list[int]] = defaultdict(list)
    for entry in record.entries:
        for client in entry.get("filtered") or []:
            rounds[client].append(entry["round"])
    # Clients that were left out in the same rounds, such as all attackers, share a row.
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for client, when in sorted(rounds.items()):
        alike[tuple(when)].append(client)
    ordered = sorted(alike.items(), key=lambda pair: -len(pair[0]))
    rows = [(spans(clients), str(len(when)), spans(when)) for when, clients in ordered]
    return _table("Clients that the rule left out", ("clients", "rounds", "which"), rows)


def suspects(record: RunRecord) -> Table | None:
    """Whom the rounds convict, where the summary says it."""
    found = ((record.summary or {}).get("suspects") or {}).get("clients", [])
    rows = [(str(one["client"]), f"{one['p']:g}") for one in found]
    return _table("Clients that stand out beyond chance", ("client", "p"), rows)


def privacy_facts(record: RunRecord) -> list[tuple[str, str]]:
    """The claims in words and what they rest on; empty where nothing is claimed."""
    told = record.figures
    facts = _clients_privacy(told["privacy"]) if told.get("privacy") else []
    if told.get("sample_privacy"):
        facts.append(_claim("one example of a client", told["sample_privacy"]))
    return facts


def signal_facts(record: RunRecord) -> list[tuple[str, str]]:
    """What the noise left of the updates, by what each round released; empty without noise."""
    told = [e["signal_to_noise"] for e in record.entries if is_number(e.get("signal_to_noise"))]
    if not told:
        return []
    drowned = sum(value == 0 for value in told)
    line = f"median {median(told):.3g} over the rounds"
    if drowned:
        line += f"; in {drowned} of {len(told)} rounds the noise drowned the update"
    return [("signal to noise of a round", line)]


def _claim(of: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    epsilon = "infinite" if entry["epsilon"] is None else upward(entry["epsilon"], 4)
    return of, f"ε = {epsilon} at δ = {exact(entry['delta'])}: {entry['claim']}"


# A bound is rounded to its safe side; what it was computed from is not rounded.
_PRIVACY_FIGURES: dict[str, Callable[[Any], str]] = {
    "epsilon": lambda value: upward(value, 6),
    "noise_multiplier": lambda value: downward(value, 6),
    "delta": exact,
    "sample_rate": exact,
}


def _clients_privacy(privacy: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {
        "claim": "what is claimed",
        "epsilon": "ε",
        "delta": "δ",
        "neighbours": "neighbours",
        "accountant": "accountant",
        "noise_multiplier": "noise multiplier z",
        "sampling": "sampling",
        "sample_rate": "sample rate q",
        "noise_location": "noise is drawn by the",
        "rounds_charged": "rounds charged",
        "rounds_of_earlier_runs": "of them in earlier runs",
    }
    facts = [
        (label, _PRIVACY_FIGURES.get(key, _plain)(privacy[key]))
        for key, label in names.items()
        if privacy.get(key) is not None
    ]
    if privacy.get("num_clients") is not None:
        facts.append(("clients of a round", _cohort(privacy)))
    local = privacy.get("local")
    if local:
        facts.append(_claim("against the server itself", local))
    return facts


def _cohort(privacy: Mapping[str, Any]) -> str:
    """Who is invited, as configured: `cohort_size` of `num_clients`, by `sampling`."""
    clients = privacy["num_clients"]
    drawn = {
        "fixed": f"{exact(privacy['cohort_size'])} of {clients} clients, drawn without replacement",
        "rotating": f"one of {privacy.get('groups')} groups of {clients} clients in turn",
        "poisson": f"each of {clients} clients with probability {exact(privacy['sample_rate'])}",
    }
    return drawn.get(privacy["sampling"], f"all {clients} clients")


def calibration_tables(posterior: Mapping[str, Any]) -> list[Table]:
    """Accuracy, NLL, Brier, ECE and entropy of posterior mean and point estimate, and the parts of
    both scores; none without a test set."""
    named = {name: posterior[key] for name, key in CALIBRATED.items() if key in posterior}
    keys = ("accuracy", "nll", "brier", "ece", "entropy")
    rows = [(name, *(f"{row[key]:.4f}" for key in keys)) for name, row in named.items()]
    heads = ("", "accuracy", "NLL (nats)", "Brier", "ECE", "entropy (nats)")
    parts = ("reliability", "resolution", "uncertainty", "within")
    split = [
        (f"{name}: {score}", *(f"{row[f'{key}_{part}']:.4f}" for part in parts))
        for score, key in (("Brier", "brier"), ("NLL", "nll"))
        for name, row in named.items()
        if f"{key}_within" in row
    ]
    tables = (
        Table("Calibration on the test set", heads, rows),
        Table("score = reliability − resolution + uncertainty + within", ("", *parts), split),
    )
    return [table for table in tables if table.rows]


def diagnosis_rows(diagnoses: Sequence[Mapping[str, Any]]) -> Table | None:
    """Mean, deviation, effective sample size and split-R̂ of every scalar that was followed."""
    rows = [
        (
            str(d["name"]),
            *(_figure(d.get(key)) for key in ("mean", "deviation", "ess", "ess_tail")),
            _figure(d["rhat"], "{:.3f}"),
        )
        for d in diagnoses
    ]
    heads = ("scalar", "mean", "deviation", "effective samples", "of the tails", "split-R̂")
    return _table("Have the samples mixed?", heads, rows)


def phase_rows(record: RunRecord) -> Table | None:
    """Where the wall time of the rounds went."""
    seconds = [entry["seconds"] for entry in record.entries if entry.get("seconds")]
    total = sum(value or 0.0 for one in seconds for value in one.values())
    rows = []
    for phase in PHASES:
        own = [one[phase] for one in seconds if one.get(phase) is not None]
        if own:
            share = 100 * sum(own) / total if total else 0.0
            cells = (f"{sum(own):.2f}", f"{median(own):.4f}", f"{share:.1f}")
            rows.append((phase.replace("-", " "), *cells))
    heads = ("phase", "total (s)", "median (s)", "share (%)")
    return _table("Seconds by phase", heads, rows)


def settings(record: RunRecord) -> list[Setting]:
    """The resolved configuration, in the order of declaration; unknown keys come last."""
    defaults = to_mapping(RunConfig())
    helps = {
        name.replace("_", "-"): field.description or ""
        for name, field in RunConfig.model_fields.items()
    }
    keys = [key for key in defaults if key in record.values]
    keys += [key for key in record.values if key not in defaults]
    return [
        Setting(
            key,
            _plain(record.values[key]),
            _plain(defaults[key]) if key in defaults else "unknown",
            key not in defaults or record.values[key] != defaults[key],
            helps.get(key, ""),
        )
        for key in keys
    ]


def spans(rounds: Sequence[int]) -> str:
    """Ascending numbers as spans: 1, 2, 3, 7 as 1–3, 7; cut after a dozen."""
    found: list[list[int]] = []
    for number in rounds:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(low) if low == high else f"{low}–{high}" for low, high in found[:12]]
    return ", ".join(texts) + (", …" if len(found) > 12 else "")


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table | None:
    if not rows:
        return None
    return Table(title, heads, rows[:_MOST_ROWS], max(0, len(rows) - _MOST_ROWS))


def _ids(whose: Counter[str]) -> str:
    """Client ids, most frequent first, cut after a dozen."""
    ids = [client for client, _ in whose.most_common()]
    return ", ".join(ids[:12]) + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


def _figure(value: Any, form: str = "{:.4g}") -> str:
    return form.format(value) if is_number(value) else "–"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if value != "" else "(empty)"
