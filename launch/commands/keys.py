"""The run-config keys as a person reads them: in the terminal, and as docs/configuration.md."""

from typing import Any, Literal, get_args, get_origin

from blackthorn.settings.config import RunConfig, server_keys, to_mapping
from blackthorn.settings.declaration import OneOf


def key_lines() -> list[str]:
    """`key = default`, what is allowed, and the line of help, for every key."""
    return [
        f"{key} = {default}  ({allowed.replace('`', '')})\n    {text}"
        for key, default, allowed, _, text in _rows()
    ]


def key_document() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "A recipe is a flat TOML file of these keys; `--set key=value` overrides one. The table is",
        "written by `blackthorn keys --markdown` from the declarations that also check every run.",
        "Keys for the server alone are not sent to the clients.",
        "",
        "| key | default | allowed | sent to | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key, default, allowed, reader, text in _rows():
        cells = (f"`{key}`", f"`{default}`", allowed, reader, text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _rows() -> list[tuple[str, str, str, str, str]]:
    defaults = to_mapping(RunConfig())
    rows = []
    for name, field in RunConfig.model_fields.items():
        key = name.replace("_", "-")
        allowed = _allowed(field.annotation, field.metadata)
        reader = "server" if key in server_keys() else "all"
        rows.append((key, _toml(defaults[key]), allowed, reader, field.description or ""))
    return rows


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
