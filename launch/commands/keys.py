"""The run-config keys as a person reads them, in the terminal and as docs/configuration.md, and as
Flower does: the table of defaults in pyproject.toml."""

from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from blackthorn.settings.catalogue import named
from blackthorn.settings.config import RunConfig, to_mapping
from blackthorn.settings.declaration import OneOf, kebab
from blackthorn.settings.key_facts import (
    free_between_chains,
    free_on_resume,
    readers_of,
    server_keys,
)


def key_lines() -> list[str]:
    """`key = default`, what is allowed, and the line of help, for every key."""
    return [
        f"{row.key} = {row.default}  ({row.allowed.replace('`', '')})\n    {row.meaning}"
        + (f" Read with {row.read_with.replace('`', '')}." if row.read_with else "")
        for row in _rows()
    ]


def flower_defaults() -> str:
    """The keys of [tool.flwr.app.config], in pyproject.toml: Flower takes no others."""
    return "".join(f"{row.key} = {row.default}\n" for row in _rows())


def key_document() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "A recipe is a flat TOML file of these keys; `--set key=value` overrides one. The table is",
        "written by `blackthorn keys --markdown` from the declarations that also check every run.",
        "Keys for the server alone are not sent to the clients. A key that is set where nothing",
        "reads it is refused, or told of before the run starts. A resumed run may have those",
        "otherwise that are marked so, and chains of one posterior (`blackthorn diagnose`) may",
        "differ in these, too.",
        "",
        "| key | default | allowed | meaning | read with | sent to | may differ |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _rows():
        cells = (f"`{row.key}`", f"`{row.default}`", *row[2:])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


class _Row(NamedTuple):
    key: str
    default: str
    allowed: str
    meaning: str
    read_with: str
    sent_to: str
    may_differ: str


def _rows() -> list[_Row]:
    defaults = to_mapping(RunConfig())
    rows = []
    for name, field in RunConfig.model_fields.items():
        key = kebab(name)
        allowed = _allowed(field.annotation, field.metadata)
        sent_to = "server" if key in server_keys() else "all"
        meaning, default = field.description or "", _toml(defaults[key])
        rows.append(_Row(key, default, allowed, meaning, _read_with(key), sent_to, _differs(key)))
    return rows


def _differs(key: str) -> str:
    if key in free_on_resume():
        return "resumed"
    return "chains" if key in free_between_chains() else ""


def _read_with(key: str) -> str:
    """The choices of other keys with which this one is read; empty: always."""
    theirs = named(lambda facts: key in facts.keys)
    if theirs:
        return f"`algorithm` {', '.join(theirs)}"
    words = []
    for reader in readers_of(key):
        values = ", ".join(_toml(value).strip('"') for value in reader.values)
        chosen = f"`{reader.chooser}` {'other than ' if reader.other else ''}{values}"
        words.append("noise for privacy" if reader.chooser == "noise" else chosen)
    return " or ".join(words)


def _allowed(annotation: Any, constraints: list[Any]) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    for constraint in constraints:
        if isinstance(constraint, OneOf):
            return ", ".join(f"`{choice}`" for choice in constraint.choices)
    if annotation is bool:
        return "`true`, `false`"
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        f"{sign} {value:g}"
        for constraint in constraints
        for attribute, sign in signs.items()
        if (value := getattr(constraint, attribute, None)) is not None
    ]
    kind = {int: "integer", float: "number", str: "text"}[annotation]
    return ", ".join([kind, *bounds])


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def keys(
    markdown: Annotated[bool, typer.Option(help="The table of docs/configuration.md.")] = False,
    defaults: Annotated[
        bool, typer.Option(help="The table of pyproject.toml that Flower takes keys from.")
    ] = False,
) -> None:
    """List every run-config key with its default and meaning.

    Example: blackthorn keys
    """
    if markdown or defaults:
        print(key_document() if markdown else flower_defaults(), end="")
    else:
        print("\n".join(key_lines()))
