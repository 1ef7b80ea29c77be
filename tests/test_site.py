"""What `make docs` builds, as far as it can be checked without building it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from blackthorn import recording, strategies

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def _hook() -> ModuleType:
    (name,) = SETTINGS["hooks"]
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_pages = _hook()
SOURCES = [*site_pages.PAGES, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def pages_in(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_in(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    there = [site_pages.place_on_site(source) for source in SOURCES]
    there += [f"api/{package}.md" for package in site_pages.PACKAGES]
    assert len(there) > 15
    assert sorted(pages_in(SETTINGS["nav"])) == sorted(there)


@pytest.mark.parametrize("source", SOURCES)
def test_a_link_of_the_repository_leads_to_the_same_file_on_the_site(source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    on_site = site_pages.place_on_site(source)
    links = re.findall(r"\]\(([^)#]+)", site_pages.relinked(text, source))
    found = {
        (ROOT / "docs" / on_site).parent.joinpath(link).resolve()
        for link in links
        if "://" not in link
    }
    linked = site_pages.linked_files(text, source)
    places = {(ROOT / "docs" / site_pages.place_on_site(path)).resolve() for path in linked}
    assert found == places


def test_links_are_those_of_the_site() -> None:
    text = "[a](privacy.md#x) [b](../README.md#start) [c](../recipes/demo.toml) [d](https://e.org)"
    expected = (
        "[a](privacy.md#x) [b](index.md#start) [c](files/recipes/demo.toml) [d](https://e.org)"
    )
    assert site_pages.relinked(text, "docs/extend.md") == expected
    assert site_pages.linked_files(text, "docs/extend.md") == {
        "docs/privacy.md",
        "README.md",
        "recipes/demo.toml",
    }
    assert site_pages.relinked("[a](docs/privacy.md)", "README.md") == "[a](privacy.md)"
    assert site_pages.relinked("[a](nowhere.md)", "README.md") == "[a](nowhere.md)"


def test_a_page_of_the_library_has_every_public_name() -> None:
    page = site_pages.api_page("strategies")
    named = re.findall(r"(?m)^::: blackthorn\.strategies\.(?:\w+\.)*(\w+)$", page)
    assert sorted(named) == sorted(strategies.__all__)
    assert "::: blackthorn.strategies.aggregation.rage.rage\n" in page
    modules = {path.stem for path in Path(recording.__path__[0]).glob("[!_]*.py")}
    named = re.findall(r"(?m)^::: blackthorn\.recording\.(\w+)$", site_pages.api_page("recording"))
    assert "run_folder" in modules
    assert set(named) == modules


def test_warnings_are_errors_when_the_site_is_built() -> None:
    """MkDocs counts no warning that --quiet keeps from its log."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,) = re.findall(r"\$\(BIN\)/mkdocs (.*)", makefile)
    assert command.split() == ["build", "--strict"]
