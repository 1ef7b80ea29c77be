"""Code blocks of Markdown pages, each with what its page says about how it is tested.

A block may be preceded by a marker, an HTML comment of one or more of these, split by `;`:

    <!-- test: settings KEY=VALUE ... -->   these --set are added to its blackthorn commands
    <!-- test: with NAME -->                a set-up of tests/test_documents.py goes before it
    <!-- test: deployment -->               it starts Flower's processes (make test-deployment)
    <!-- test: slow -->                     it takes minutes (make test-slow)
    <!-- test: data -->                     it needs BLACKTHORN_DATA_DIR
    <!-- test: fails with N -->             its last command ends with this exit code
    <!-- test: not run because REASON -->   it cannot be run as it stands

and a whole page may say `<!-- test: this page is tested by tests/test_NAME.py -->`.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

_MARKER = re.compile(r"<!--\s*test:\s*(.*?)\s*-->", re.DOTALL)
_PAGE = re.compile(r"this page is tested by (tests/(?:\w+/)*test_\w+\.py)")


class BadMarker(ValueError):
    """A marker that says nothing that is known."""


@dataclass(frozen=True)
class Block:
    """A code block: `language` is empty for an indented one; `line` is where it begins."""

    page: str
    line: int
    language: str
    text: str
    settings: tuple[str, ...] = ()
    setups: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    exit_code: int = 0
    exempt: str = ""

    @property
    def name(self) -> str:
        """How a test names it."""
        return f"{self.page}:{self.line}"


@dataclass
class _Marker:
    settings: list[str] = field(default_factory=list)
    setups: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    exit_code: int = 0
    exempt: str = ""


def blocks_of(path: Path, page: str) -> list[Block]:
    """All code blocks of a page, indented or fenced, in lists and quotes too."""
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    found = []
    marker: _Marker | None = None
    for token in tokens:
        if token.type == "html_block":
            told = _MARKER.search(token.content)
            if told and not _PAGE.fullmatch(told.group(1)):
                marker = _parse(" ".join(told.group(1).split()), f"{page}:{_line(token.map)}")
        elif token.type in ("fence", "code_block"):
            own = marker or _Marker()
            found.append(
                Block(
                    page,
                    _line(token.map),
                    token.info.strip(),
                    token.content,
                    tuple(own.settings),
                    tuple(own.setups),
                    tuple(own.marks),
                    own.exit_code,
                    own.exempt,
                )
            )
            marker = None
        elif marker is not None:
            raise BadMarker(f"{page}:{_line(token.map)}: the marker above is followed by no block")
    return found


def other_test_of(path: Path) -> str | None:
    """The test file that a page names as its own."""
    told = _PAGE.search(path.read_text(encoding="utf-8"))
    return told.group(1) if told else None


def _line(lines: list[int] | None) -> int:
    return lines[0] + 1 if lines else 0


def _parse(text: str, where: str) -> _Marker:
    marker = _Marker()
    # A reason may hold a semicolon: it stands alone.
    parts = [text] if text.startswith("not run because") else text.split(";")
    for part in map(str.strip, parts):
        kind, _, rest = part.partition(" ")
        if part in ("deployment", "slow", "data"):
            marker.marks.append(part)
        elif kind == "settings" and rest and all("=" in word for word in rest.split()):
            marker.settings += rest.split()
        elif kind == "with" and rest:
            marker.setups += rest.split()
        elif part.startswith("fails with ") and part.removeprefix("fails with ").isdigit():
            marker.exit_code = int(part.removeprefix("fails with "))
        elif part.startswith("not run because ") and len(part.split()) > 5:
            marker.exempt = part.removeprefix("not run because ")
        else:
            raise BadMarker(f"{where}: the marker {part!r} says nothing that is known")
    return marker
