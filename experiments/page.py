"""A paper's report: one HTML file without anything from elsewhere, and its tables as Markdown."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from blackthorn.experiments.finding import Claim
from blackthorn.experiments.study import Experiment, Paper, Section, Table
from blackthorn.reporting.report_page import STYLE

_STYLE = (
    STYLE
    + """
.verdict { display: inline-block; padding: 0 .5rem; border: 2px solid; border-radius: 1rem;
  font-weight: 600; white-space: nowrap; }
.reproduced { color: var(--good); } .partly { color: var(--mark); } .not { color: var(--bad); }
.unchecked, .open { color: var(--soft); }
.claims td { min-width: 9rem; } .claims td:nth-child(2) { min-width: 16rem; }
@media (max-width: 44rem) { .claims thead { display: none; }
  .claims tr { display: block; border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .claims td { display: block; border: 0; padding: .1rem 0; }
  .claims td:first-child { font-weight: 600; } }
nav ul { columns: 18rem; padding-left: 1.2rem; }
caption { text-align: left; color: var(--soft); font-size: .875rem; padding-bottom: .2rem; }
"""
)

_PAGE = """
{%- macro badge(claim) -%}
<span class="verdict {{ classes.get(claim.verdict, claim.verdict) }}">
{{- claim.verdict_said }}</span>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ paper.title }} – reproduced with Blackthorn</title>
<style>{{ style|safe }}</style>
</head>
<body>
<header>
<p class="soft">Blackthorn: a paper measured anew</p>
<h1>{{ paper.title }}</h1>
<p>{{ paper.authors }}</p>
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}
<ul class="tiles">
{% for label, value in counts %}<li><span class="soft">{{ label }}</span>
<strong>{{ value }}</strong></li>
{% endfor %}</ul>
<div class="scroll"><table><tbody>
{% for name, value in facts %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div>
{% for text in paper.texts %}<p>{{ text }}</p>
{% endfor %}
<p>A claim is reproduced where every figure lies in its expected range, not reproduced where none
does, partly between. “Expected” is what a right implementation gives, as known beforehand; the
paper's own numbers are called the paper's. “±” is the standard error of a mean over seeds or
draws; a figure without one is of one run. Where there are several, the 95 % interval of the mean
(Student's t) decides: what should be above something must be so over all of the interval, and a
mean outside its range counts against a claim if all of the interval is outside. What that leaves
open is “not significant”.</p>
{% if parts|length > 1 %}<nav><ul>
{% for part in parts %}<li><a href="#{{ part.experiment.name }}">
{{- part.experiment.title }}</a></li>
{% endfor %}</ul></nav>{% endif %}
</header>
{% for part in parts %}
<section id="{{ part.experiment.name }}">
<h2>{{ part.experiment.title }}</h2>
<p>{{ part.experiment.about }}</p>
{% if part.section is none %}<p class="note">Not measured yet: {{ part.missing }}.</p>
{% else %}
{% for text in part.section.texts %}<p>{{ text }}</p>
{% endfor %}
{% if part.section.claims %}<div class="scroll"><table class="claims">
<thead><tr><th scope="col">claim</th><th scope="col">measured</th><th scope="col">verdict</th></tr>
</thead><tbody>
{% for claim in part.section.claims %}<tr><td>{{ claim.text }}
{% if claim.ours %}<br><small>our finding, not the paper's</small>{% endif %}</td>
<td>{{ claim.sentence }}{% if claim.note %}<br><small>{{ claim.note }}</small>{% endif %}</td>
<td>{{ badge(claim) }}{% if not claim.agrees %}<br><small>expected:
{{ claim.foreseen }}</small>{% elif claim.foreseen is none %}<br><small>nothing was known
beforehand</small>{% elif claim.verdict == 'not' %}<br><small>as expected</small>{% endif %}</td>
</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if part.images %}<div class="figures">
{% for image in part.images %}<figure><img src="data:image/png;base64,{{ image.base64 }}"
 alt="{{ image.caption }}"><figcaption>{{ image.caption }}</figcaption></figure>
{% endfor %}</div>{% endif %}
{% for table in part.section.tables %}<div class="scroll"><table>
<caption>{{ table.caption }}</caption>
<thead><tr>{% for head in table.heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr>{% for cell in row %}<td class="number">{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endfor %}
{% if part.section.setting %}<details><summary>Hyper-parameters</summary>
<div class="scroll"><table><tbody>
{% for name, value in part.section.setting.items() %}<tr><th scope="row"><code>{{ name }}</code>
</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div></details>{% endif %}
{% endif %}
</section>
{% endfor %}
<footer><p class="soft">The numbers are in <code>cells.jsonl</code> and the figures in
<code>plots/</code> beside this file.</p></footer>
</body>
</html>
"""


@dataclass(frozen=True)
class Part:
    """An experiment's place in the report; without a section, `missing` says what it lacks."""

    experiment: Experiment
    section: Section | None
    missing: str = ""


@dataclass(frozen=True)
class _Image:
    base64: str
    caption: str


def write_report(
    folder: Path,
    paper: Paper,
    parts: Sequence[Part],
    facts: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Path:
    """report.html, results.md and plots/*.png in `folder`; the path of report.html.

    `facts` are lines such as the command and the date, `notes` what a reader must not miss.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    shown: list[dict[str, Any]] = [
        {
            "experiment": part.experiment,
            "section": part.section,
            "missing": part.missing,
            "images": [] if part.section is None else _images(part.section, folder / "plots"),
        }
        for part in parts
    ]
    page = environment.from_string(_PAGE).render(
        paper=paper,
        parts=shown,
        facts=list(facts.items()),
        notes=notes,
        counts=_counts([c for p in parts if p.section is not None for c in p.section.claims]),
        classes={"not checked": "unchecked", "not significant": "open"},
        style=_STYLE,
    )
    path = folder / "report.html"
    path.write_text(page.lstrip(), encoding="utf-8")
    (folder / "results.md").write_text(_markdown(paper, parts, facts, notes), encoding="utf-8")
    return path


def _counts(claims: Sequence[Claim]) -> list[tuple[str, str]]:
    kinds = ("reproduced", "partly", "not", "not significant", "not checked")
    count = {kind: sum(claim.verdict == kind for claim in claims) for kind in kinds}
    shown = [(("not reproduced" if k == "not" else k), str(n)) for k, n in count.items() if n]
    agreeing = sum(claim.agrees for claim in claims)
    return [*shown, ("verdicts as expected", f"{agreeing} of {len(claims)}")]


def _images(section: Section, folder: Path) -> list[_Image]:
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    for plot in section.plots:
        png = _png(plot.figure)
        (folder / f"{plot.name}.png").write_bytes(png)
        images.append(_Image(base64.b64encode(png).decode(), plot.caption))
    return images


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, dpi=150)
    return buffer.getvalue()


def _markdown(
    paper: Paper, parts: Sequence[Part], facts: Mapping[str, str], notes: Sequence[str]
) -> str:
    lines = [f"## {paper.title}", "", f"{paper.authors}.", ""]
    lines += [f"* {name}: {value}" for name, value in facts.items()]
    lines += [f"* {note}" for note in notes]
    for part in parts:
        lines += ["", f"### {part.experiment.title}", "", f"{part.experiment.about}", ""]
        if part.section is None:
            lines.append(f"Not measured: {part.missing}.")
            continue
        lines += _table_lines(_claims_table(part.section.claims))
        for table in part.section.tables:
            lines += ["", f"{table.caption}", "", *_table_lines(table)]
    return "\n".join(lines) + "\n"


def _claims_table(claims: Sequence[Claim]) -> Table:
    rows = []
    for claim in claims:
        whose = " (our finding)" if claim.ours else ""
        note = f" {claim.note}" if claim.note else ""
        rows.append([claim.text + whose, f"{claim.sentence}.{note}", claim.verdict_said])
    return Table("", ["claim", "measured", "verdict"], rows)


def _table_lines(table: Table) -> list[str]:
    rows = [table.heads, ["---"] * len(table.heads), *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
