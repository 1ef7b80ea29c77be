"""docs/results.md is the one source of what was measured; other pages copy tables of it."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
MARKER = re.compile(r"<!-- from results\.md: (?P<caption>.+) -->\n\n(?P<table>(?:\|.*\n)+)")
COPIES = [
    (page.name, match["caption"], match["table"])
    for page in sorted(DOCS.glob("*.md"))
    for match in MARKER.finditer(page.read_text(encoding="utf-8"))
]


def test_a_page_copies_a_table() -> None:
    assert [page for page, _, _ in COPIES] == ["attacks.md"]


@pytest.mark.parametrize(("page", "caption", "table"), COPIES)
def test_a_copied_table_is_the_one_of_the_results(page: str, caption: str, table: str) -> None:
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    found = re.findall(rf"^{re.escape(caption)}\n\n((?:\|.*\n)+)", results, re.MULTILINE)
    assert found == [table], f"{page}: copy the table anew from results.md"
