"""report.html: what is in it, what must never be, and that nothing about it can fail a run."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from digits_runs import configuration, private_run
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from blackthorn.launch.cli import app
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import read_metrics
from blackthorn.reporting import report_page, run_plots
from blackthorn.reporting.report_facts import spans
from blackthorn.reporting.report_privacy import spent_by_round
from blackthorn.reporting.run_plots import draw_plots
from blackthorn.reporting.run_record import read_record
from blackthorn.reporting.run_report import publish, write_report
from blackthorn.settings.config import ConfigError
from blackthorn.settings.rounding import upward
from blackthorn.strategies.accounting import Release, spent


class Page(HTMLParser):
    """Text, tags with attributes, and table rows of a page; refuses tags that do not nest."""

    VOID = ("meta", "img", "br", "link", "hr", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if self._open and self._open[-1] in ("td", "th", "code", "strong") and "tr" in self._open:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        found = [row for row in self.rows if row and row[0].strip() == first]
        assert len(found) == 1, f"{first}: {len(found)} rows"
        return [cell.strip() for cell in found[0]]


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def reported_run(folder: Path, **options: Any) -> dict[str, Any]:
    return simulate(configuration(folder, report=True, **options), Console(quiet=True))


def by_hand(folder: Path, lines: list[dict[str, Any]], torn: str = "", **config: Any) -> Path:
    """A run folder as a killed run leaves it: configuration and lines, no summary."""
    folder.mkdir(parents=True, exist_ok=True)
    toml = "".join(f"{key.replace('_', '-')} = {json.dumps(v)}\n" for key, v in config.items())
    (folder / "config.toml").write_text('algorithm = "rage"\ntask = "digits"\n' + toml)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + torn)
    return folder


def test_a_run_leaves_a_page_that_stands_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = reported_run(folder, num_clients=6, attack="nan", num_byzantine=1, local_lr=0.05)
    page = page_of(folder)
    assert page.text.count("completed") >= 1
    assert f"{100 * summary['final']['accuracy']:.1f} %" in page.text
    assert f"{summary['final']['loss']:.4g}" in page.text
    assert "3 of 3" in page.text
    # Five honest clients in each of three rounds, and the one that is rejected.
    assert "3 rejected, of 18 invited" in page.text
    reason = read_metrics(folder)[1]["rejected"][0]["reason"]
    assert page.row(reason)[1:] == ["3", "5"]
    # What differs from the defaults is marked, and only that.
    marked = [attrs for tag, attrs in page.tags if tag == "tr" and attrs.get("class") == "changed"]
    assert len(marked) == len([row for row in page.rows if row and row[0].strip() in CHANGED])
    assert page.row("local-lr")[1:3] == ["0.05", "0.1"]
    # Nothing from elsewhere, nothing that runs.
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "form"}
    images = [attrs["src"] or "" for tag, attrs in page.tags if tag == "img"]
    assert all(source.startswith("data:image/png;base64,") for source in images)
    drawn = sorted((folder / "plots").iterdir())
    assert len(images) == len(drawn) >= 7
    inside = {base64.b64decode(source.partition(",")[2]) for source in images}
    assert inside == {path.read_bytes() for path in drawn}
    for path in drawn:
        with Image.open(path) as image:
            assert image.width >= 800
    assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img")


CHANGED = (
    *("model", "partition", "examples-per-client", "num-clients", "num-server-rounds"),
    *("local-steps", "batch-size", "local-lr", "attack", "num-byzantine", "instruments"),
    *("tensorboard", "output-dir"),
)


def test_the_phases_of_a_round_add_up_to_all_of_it(tmp_path: Path) -> None:
    reported_run(tmp_path)
    rows = page_of(tmp_path).rows
    entries = read_metrics(tmp_path)
    for phase in ("training", "screening", "aggregation", "server step", "evaluation"):
        (row,) = [r for r in rows if r and r[0] == phase]
        measured = sum(entry["seconds"].get(phase.replace(" ", "-"), 0) for entry in entries)
        assert float(row[1]) == pytest.approx(measured, abs=0.006)
    shares = [
        float(row[3])
        for row in rows
        if len(row) == 4
        and row[0] in ("training", "screening", "aggregation", "server step", "evaluation")
    ]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_under_a_claim_nothing_of_the_cohort_is_in_it(tmp_path: Path) -> None:
    summary = private_run(tmp_path, report=True, num_server_rounds=4)
    operator = tmp_path / "operator.jsonl"
    lines = [json.loads(line) for line in operator.read_text().splitlines()]
    # A reason and a time that only the operator may know.
    lines[1]["rejected"] = [{"client": 3, "reason": "SECRET-REASON"}]
    lines[1]["seconds"] = {"training": 7654.321}
    operator.write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert "SECRET-REASON" not in html
    assert "7654" not in html
    operator.unlink()
    assert write_report(tmp_path).read_text() == html
    assert not (tmp_path / "plots" / "clients.png").exists()
    assert not (tmp_path / "plots" / "phases.png").exists()
    drawn = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"accuracy", "loss", "epsilon", "signal-to-noise"}
    assert upward(summary["privacy"]["epsilon"]) in page.text
    assert page.row("neighbours")[1] == "add-remove"
    assert page.row("accountant")[1] == "rdp"
    assert page.row("what is claimed")[1] == summary["privacy"]["claim"]
    assert page.row("rounds charged")[1] == "4"


def test_noise_at_the_clients_is_told_from_the_central_claim(tmp_path: Path) -> None:
    summary = private_run(tmp_path, report=True, noise_location="client", clip_norm_from_data=True)
    page = page_of(tmp_path)
    assert page.row("what is claimed")[1] == summary["privacy"]["claim"]
    assert "chosen from the clients' data" in page.text
    local = page.row("against the server itself")[1]
    assert local.startswith(
        f"ε = {upward(summary['privacy']['local']['epsilon'], 4)} at δ = 1e-05: "
    )


def test_the_curve_of_epsilon_is_the_ledgers(tmp_path: Path) -> None:
    private_run(tmp_path, report=True, num_server_rounds=4)
    curve = spent_by_round(read_record(tmp_path))
    assert curve is not None
    assert curve.delta == 1e-5
    expected = [(t, spent([(Release(2.0, 0.5), t)], 1e-5).epsilon) for t in (1, 2, 3, 4)]
    assert curve.points == [(t, pytest.approx(epsilon)) for t, epsilon in expected]
    # And the lines of metrics.jsonl say the same as the run goes.
    lines = read_metrics(tmp_path)
    assert "epsilon_rdp" not in lines[0]
    told = [(line["round"], line["epsilon_rdp"]) for line in lines[1:]]
    assert told == [(t, pytest.approx(epsilon)) for t, epsilon in expected]


def test_a_posterior_s_calibration_and_diagnostics_are_the_summary_s(tmp_path: Path) -> None:
    options = {"local_lr": 1e-4, "num_server_rounds": 12, "instruments": False}
    summary = reported_run(tmp_path, algorithm="fa-ld", partition="iid", **options)
    page = page_of(tmp_path)
    told = summary["posterior"]
    keys = ("accuracy", "nll", "brier", "ece", "entropy")
    tempered = ("point estimate, tempered", "point_tempered")
    for name, figures in (("posterior mean", "posterior"), ("point estimate", "point"), tempered):
        assert page.row(name)[1:] == [f"{told[figures][key]:.4f}" for key in keys]
        reliability, resolution, *rest = map(float, page.row(f"{name}: Brier")[1:])
        score = reliability - resolution + sum(rest)
        assert score == pytest.approx(told[figures]["brier"], abs=3e-4)
    assert page.row("posterior samples kept")[1] == str(told["samples"])
    diagnoses = json.loads((tmp_path / "posterior" / "diagnostics.json").read_text())
    for row in diagnoses:
        assert float(page.row(row["name"])[3]) == pytest.approx(row["ess"], rel=1e-3)
        assert float(page.row(row["name"])[4]) == pytest.approx(row["ess_tail"], rel=1e-3)
        assert float(page.row(row["name"])[5]) == pytest.approx(row["rhat"], abs=1e-3)
    assert told["mixing"] in page.text
    captions = [attrs["alt"] or "" for tag, attrs in page.tags if tag == "img"]
    assert any(caption.startswith("Reliability") for caption in captions)


def test_the_epsilon_of_examples_is_the_server_s_own(tmp_path: Path) -> None:
    """The server's own, of all rounds: clients' words are of those in which their replies came."""
    lines = [{"round": t, "sample_epsilon": {"0": 1.25 * t}} for t in (1, 2)] + [{"round": 3}]
    folder = by_hand(tmp_path / "run", lines)
    told = {"epsilon": 5.3931, "delta": 1e-4, "claim": "of every single example"}
    summary = {"status": "completed", "rounds_completed": 3, "final": {}, "sample_privacy": told}
    (folder / "summary.json").write_text(json.dumps({**summary, "privacy": None}))
    write_report(folder)
    page = page_of(folder)
    assert page.row("one example of a client")[1].startswith("ε = 5.394 at δ = 0.0001: of every")
    assert "2.5" not in page.text
    assert "as they themselves say" not in page.text


def test_a_killed_run_still_has_a_report(tmp_path: Path) -> None:
    lines = [
        {"round": 0, "accuracy": 0.1, "loss": 2.3, "local_lr": 0.1, "evaluated_by": "server"},
        {"round": 1, "accuracy": 0.625, "loss": 0.7, "local_lr": 0.1, "invited": 3, "replied": 2,
         "rejected": [{"client": 2, "reason": "late"}], "filtered": [1], "over_bound": [],
         "seconds": {"training": 1.5, "aggregation": 0.25}, "evaluated_by": "server"},
    ]  # fmt: skip
    folder = by_hand(tmp_path / "run", lines, torn='{"round": 2, "accu')
    page = Page(write_report(folder).read_text())
    assert "incomplete" in page.text
    assert "There is no summary.json" in page.text
    assert "last line of metrics.jsonl is torn" in page.text
    assert "62.5 %" in page.text
    assert page.row("late")[1:] == ["1", "2"]
    assert page.row("1")[1:] == ["1", "1"]  # client 1, filtered in one round, the first
    assert page.row("training")[1] == "1.50"


def test_a_damaged_folder_still_has_a_report(tmp_path: Path) -> None:
    folder = by_hand(tmp_path / "run", [{"round": 1}])
    with (folder / "metrics.jsonl").open("ab") as stream:
        stream.write(b'\xff\xfe{"round"\n[1]\n{"round": "two"}\n')
    (folder / "summary.json").write_text("{")
    (folder / "config.toml").write_text("algorithm = ")
    page = Page(write_report(folder).read_text())
    assert "3 lines of metrics.jsonl cannot be read" in page.text
    assert "summary.json cannot be read" in page.text
    assert "config.toml cannot be read" in page.text
    assert "incomplete" in page.text


def test_a_failed_run_has_a_report_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no round changed the model"):
        reported_run(tmp_path, attack="raise", num_byzantine=4)
    page = page_of(tmp_path)
    assert "failed" in page.text
    assert "no round changed the model" in page.text


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"


def test_whatever_a_client_says_is_text(tmp_path: Path) -> None:
    line = {
        "round": 1, "invited": 1, "replied": 0, "filtered": [], "seconds": {"training": 1.0},
        "rejected": [{"client": EVIL, "reason": EVIL}], "skipped": EVIL,
    }  # fmt: skip
    folder = by_hand(tmp_path / "run", [line], attack=EVIL, unknown_key=EVIL)
    summary = {"status": EVIL, "reason": EVIL, "final": {"accuracy": EVIL}, "clients": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    html = write_report(folder).read_text()
    page = Page(html)
    assert "<script" not in html
    assert "<img src=x" not in html
    assert EVIL in page.text
    assert [attrs for tag, attrs in page.tags if any("alert" in (v or "") for v in attrs.values())
            ] == []  # fmt: skip


def test_no_run_no_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)


def test_the_command_writes_it_anew(tmp_path: Path) -> None:
    reported_run(tmp_path)
    before = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    (tmp_path / "plots" / "accuracy.png").unlink()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == before


def test_a_plot_that_fails_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(record: Any, path: Path) -> Path | None:
        raise ZeroDivisionError(f"no plot at {path.name} of {len(record.entries)} lines")

    monkeypatch.setitem(run_plots.DRAWINGS, "accuracy", broken)
    summary = reported_run(tmp_path)
    assert summary["status"] == "completed"
    assert "plot accuracy could not be drawn: ZeroDivisionError" in caplog.text
    drawn = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert "accuracy" not in drawn
    assert "loss" in drawn
    assert "completed" in page_of(tmp_path).text


def test_a_plot_that_fails_leaves_none_of_an_earlier_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported_run(tmp_path)
    monkeypatch.setitem(run_plots.DRAWINGS, "accuracy", lambda *_: 1 / 0)
    write_report(tmp_path)
    assert not (tmp_path / "plots" / "accuracy.png").exists()
    assert (tmp_path / "plots" / "loss.png").exists()


def test_a_report_that_fails_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report_page, "PAGE", "{{ nonsense }}")
    assert reported_run(tmp_path)["status"] == "completed"
    assert "no report of" in caplog.text
    assert not (tmp_path / "report.html").exists()
    assert publish(tmp_path / "nowhere") is None


@pytest.mark.parametrize("algorithm", ["gfedavg", "fa-ld"])
def test_where_report_is_false_nothing_is_drawn(tmp_path: Path, algorithm: str) -> None:
    simulate(
        configuration(tmp_path, report=False, algorithm=algorithm, local_lr=1e-4),
        Console(quiet=True),
    )
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "plots").exists()


def test_every_plot_can_be_drawn(tmp_path: Path) -> None:
    many = {"num_clients": 22, "partition": "iid", "algorithm": "ce-fedavg", "clip_norm": 0.5}
    reported_run(tmp_path, aggregator="rage", num_corrupt=2, **many)
    drawn = {path.stem for path in draw_plots(read_record(tmp_path))}
    assert drawn == set(run_plots.DRAWINGS) - {"epsilon", "metrics", "signal-to-noise"}


def test_clients_that_are_left_out_together_share_a_row(tmp_path: Path) -> None:
    filtered = [[7, 8, 9, 3], [9, 8, 7], [7, 8, 9, 1]]
    lines = [{"round": t, "filtered": clients} for t, clients in enumerate(filtered, start=1)]
    write_report(by_hand(tmp_path / "run", lines))
    page = page_of(tmp_path / "run")
    assert page.row("7–9")[1:] == ["3", "1–3"]
    assert page.row("3")[1:] == ["1", "1"]
    assert page.row("1")[1:] == ["1", "3"]


def test_consecutive_rounds_are_one_span_and_long_lists_are_cut() -> None:
    assert spans([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"
    assert spans([4]) == "4"
    assert spans(range(0, 60, 2)).endswith(", …")
    assert len(re.findall(r"\d+", spans(range(0, 60, 2)))) == 12


def test_the_report_says_where_the_noise_drowned_the_update(tmp_path: Path) -> None:
    """Noise alone passes for an update beside it in one round of 44 (two deviations)."""
    private_run(tmp_path, report=True, noise_multiplier=50.0)
    told = [entry["signal_to_noise"] for entry in read_metrics(tmp_path)[1:]]
    drowned = told.count(0.0)
    assert len(told) == 3
    assert drowned >= 1
    page = Page((tmp_path / "report.html").read_text())
    assert f"; in {drowned} of 3 rounds the noise drowned the update" in page.text
    assert ("median 0 over the rounds" in page.text) == (drowned > 1)
    assert (tmp_path / "plots" / "signal-to-noise.png").exists()
