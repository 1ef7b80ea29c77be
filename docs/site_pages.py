"""What MkDocs builds beside the pages of docs/, and where links that leave docs/ lead (a hook).

In the repository links are relative paths, so that the pages can be read there as they are. On the
site README.md is the first page, and any other file that a page links to is copied beside it.
"""

import importlib
import inspect
import os
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Files outside docs/ that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Packages whose public names have a page each.
PACKAGES = ("strategies", "attacks", "client_app", "simulation", "recording")
_WITH_PATH = "    options:\n      show_root_full_path: true\n"
_LINK = re.compile(r"\]\(([^()\s#]+)(#[^()\s]*)?\)")


def place_on_site(path: str) -> str:
    """Where the site has the repository's file `path`."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"files/{path}")


def source_of(page: str) -> str:
    """The repository's file that is the site's `page`."""
    return {place: path for path, place in PAGES.items()}.get(page, f"docs/{page}")


def linked_files(text: str, source: str) -> set[str]:
    """The repository's files that the Markdown of its file `source` links to."""
    paths = {_path(match[1], source) for match in _LINK.finditer(text)}
    return {path for path in paths if not path.startswith("..") and (ROOT / path).is_file()}


def relinked(text: str, source: str) -> str:
    """The Markdown of the repository's file `source` with its links as they are on the site."""
    folder = posixpath.dirname(place_on_site(source))

    def link(match: re.Match[str]) -> str:
        path = _path(match[1], source)
        if path.startswith("..") or not (ROOT / path).is_file():
            return match[0]  # for MkDocs to find fault with
        return f"]({posixpath.relpath(place_on_site(path), folder or '.')}{match[2] or ''})"

    return _LINK.sub(link, text)


def api_page(package: str) -> str:
    """The Markdown of a package's page: what its __all__ names, else its modules' public names."""
    module = importlib.import_module(f"blackthorn.{package}")
    lines = [f"# blackthorn.{package}", "", inspect.getdoc(module) or "", ""]
    names = getattr(module, "__all__", None)
    if names is None:
        files = sorted((ROOT / package).glob("[!_]*.py"))
        lines += [f"::: blackthorn.{package}.{path.stem}\n{_WITH_PATH}" for path in files]
    else:
        lines += [f"::: {_definition(module, name)}\n" for name in names]
    return "\n".join(lines)


def _definition(module: ModuleType, name: str) -> str:
    # A function may be called like the module that it is in.
    value = getattr(module, name)
    where = value.__module__ if inspect.isclass(value) or inspect.isfunction(value) else None
    return f"{where or module.__name__}.{name}"


def _path(target: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


# What MkDocs calls.


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that do not lie in docs/."""
    from mkdocs.structure.files import File

    sources = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    texts = {source: (ROOT / source).read_text(encoding="utf-8") for source in sources}
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=texts[source]))
    for package in PACKAGES:
        files.append(File.generated(config, f"api/{package}.md", content=api_page(package)))
    for path in sorted(set().union(*(linked_files(texts[source], source) for source in texts))):
        if not path.startswith("docs/") and path not in PAGES:
            place = place_on_site(path)
            files.append(File.generated(config, place, abs_src_path=os.fspath(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn a page's links into the site's."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    return relinked(markdown, source_of(page.file.src_uri))
