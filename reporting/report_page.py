"""The page of a report, of a run or of several: one file without anything from elsewhere.

It is Python rather than a file of its own because Flower's app bundle carries no HTML.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

STYLE = """
:root { --ink: #1c2024; --soft: #5b6470; --line: #d5dae0; --paper: #ffffff; --card: #f5f7f9;
  --good: #00674b; --bad: #a33f00; --mark: #0072b2; }
@media (prefers-color-scheme: dark) { @media screen { :root { --ink: #e8eaed; --soft: #a7b0ba;
  --line: #3c434b; --paper: #16191c; --card: #20252a; --good: #3fc79c; --bad: #ff9a5c;
  --mark: #6db9e8; } } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin: .2rem 0; line-height: 1.25; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; padding-bottom: .2rem;
  border-bottom: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 48rem; }
.soft, figcaption, small { color: var(--soft); font-size: .875rem; }
.status { display: inline-block; padding: .05rem .6rem; border: 2px solid; border-radius: 1rem;
  font-weight: 600; }
.completed { color: var(--good); } .failed, .incomplete { color: var(--bad); }
.note { border-left: .3rem solid var(--bad); background: var(--card); padding: .4rem .8rem;
  margin: .6rem 0; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: .6rem; margin: 1rem 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border-radius: .4rem; padding: .5rem .8rem; }
.tiles strong { display: block; font-size: 1.35rem; line-height: 1.3; }
.tiles span, .tiles small { display: block; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; align-items: start; }
figure { margin: 0; max-width: 40rem; }
figure img { width: 100%; height: auto; display: block; background: #fff; border-radius: .4rem;
  border: 1px solid var(--line); }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; } td { font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-top: .4rem;
  white-space: nowrap; }
td.long { overflow-wrap: anywhere; min-width: 12rem; }
h1, .note, .tiles, .defaults { overflow-wrap: anywhere; }
.settings td.long { min-width: 8rem; }
.changed td:first-child, .changed td:nth-child(2) { font-weight: 700; }
.changed td:first-child::before { content: "● "; color: var(--mark); }
code { font-family: ui-monospace, monospace; font-size: .9em; }
@media screen and (max-width: 40rem) {
  table { font-size: .8rem; } th, td { padding-right: .5rem; }
  .settings thead { display: none; } .settings, .settings tbody { display: block; }
  .settings tr { display: grid; grid-template-columns: 1fr auto; column-gap: 1rem;
    border-bottom: 1px solid var(--line); padding: .3rem 0; }
  .settings td { border: 0; padding: 0; } .settings td:nth-child(2) { text-align: right; }
  .settings td:nth-child(n+3) { grid-column: 1 / -1; }
  .settings td:nth-child(3)::before { content: "by default "; color: var(--soft); } }
.defaults { columns: 22rem; column-gap: 2rem; padding: 0; list-style: none; font-size: .875rem; }
.defaults li { break-inside: avoid; border-bottom: 1px solid var(--line); padding: .1rem 0; }
@media print { body { max-width: none; padding: 0; font-size: .8rem; } h2 { break-after: avoid; }
  figure, .tiles li, tr, .note { break-inside: avoid; } .scroll { overflow: visible; }
  .figures { grid-template-columns: 1fr 1fr; } .defaults { columns: 3; font-size: .7rem; }
  @page { margin: 1.5cm; } }
"""

PAGE = """
{%- macro table(data) -%}
<div class="scroll"><table><caption>{{ data.title }}</caption>
<thead><tr>{% for head in data.heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in data.rows %}<tr>{% for cell in row %}<td
{%- if cell|length > 40 %} class="long"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if data.left_out %}<p class="soft">and {{ data.left_out }} more.</p>{% endif %}
{%- endmacro -%}
{%- macro show(figures) -%}
{% if figures %}<div class="figures">
{% for figure in figures %}<figure><img src="data:image/png;base64,{{ figure.base64 }}"
 alt="{{ figure.caption }}"><figcaption>{{ figure.caption }}</figcaption></figure>
{% endfor %}</div>{% endif %}
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }} – Blackthorn {{ kind }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<p class="soft">Blackthorn {{ kind }}</p>
<h1>{{ title }}</h1>
{% if status %}<p><span class="status {{ status }}">{{ status }}</span></p>{% endif %}

{% if reason %}<p class="note"><strong>Why it failed:</strong> {{ reason }}</p>{% endif %}
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}
{% if tiles %}<ul class="tiles">
{% for tile in tiles %}<li><span class="soft">{{ tile.label }}</span><strong>{{ tile.value }}
</strong>{% if tile.note %}<small>{{ tile.note }}</small>{% endif %}</li>
{% endfor %}</ul>{% endif %}

</header>

{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% for text in section.texts %}<p>{{ text }}</p>
{% endfor %}
{% if section.told %}<div class="scroll"><table><tbody>
{% for name, value in section.told %}<tr><th scope="row">{{ name }}</th><td class="long">
{{- value }}</td></tr>
{% endfor %}</tbody></table></div>{% endif %}
{{ show(section.figures) }}
{% for entry in section.tables %}{{ table(entry) }}
{% endfor %}
</section>
{% endfor %}

{% if settings %}<section>
<h2>Configuration</h2>
<p>Every key as it was resolved. <code>config.toml</code> in the run folder is a recipe that starts
the same run again. What differs from the defaults:</p>
<div class="scroll"><table class="settings">
<thead><tr><th scope="col">key</th><th scope="col">value</th><th scope="col">default</th>
<th scope="col">meaning</th></tr></thead>
<tbody>
{% for setting in settings if setting.changed %}<tr class="changed"><td><code>
{{- setting.key }}</code></td><td{% if setting.value|length > 20 %} class="long"{% endif %}>
{{- setting.value }}</td><td>{{ setting.default }}</td>
<td class="soft">{{ setting.help }}</td></tr>
{% else %}<tr><td colspan="4">nothing</td></tr>
{% endfor %}</tbody></table></div>
<p>As by default:</p>
<ul class="defaults">
{% for setting in settings if not setting.changed %}<li><code>{{ setting.key }}</code> =
{{ setting.value }}</li>
{% endfor %}</ul>
</section>{% endif %}
<footer><p class="soft">How to read this page: docs/report.md. {{ foot }}</p></footer>
</body>
</html>
"""


def page_of(
    *,
    title: str,
    kind: str,
    notes: Sequence[str],
    sections: Sequence[Any],
    foot: str | Markup,
    of_a_run: Mapping[str, Any] | None = None,
) -> str:
    """The page as text. Everything that came from a file is escaped.

    `of_a_run`: what one run has beside its sections: status, reason, tiles, settings.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    nothing = {"status": "", "reason": None, "tiles": (), "settings": ()}
    return environment.from_string(PAGE).render(
        title=title,
        kind=kind,
        notes=notes,
        sections=sections,
        foot=foot,
        style=Markup(STYLE),
        **{**nothing, **(of_a_run or {})},
    )
