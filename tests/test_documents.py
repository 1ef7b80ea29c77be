"""Every code block of README.md, CONTRIBUTING.md and docs/ is run, or says why it cannot be.

tests/harness/markdown_blocks.py has the markers with which a page says how a block is run.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flower_simulation import RAY_STARTS, ray_did_not_start, simulating_superlink
from markdown_blocks import BadMarker, Block, blocks_of, other_test_of
from rich.console import Console
from warm_python import run_script

from blackthorn.launch.cli import main
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.app_bundle import COMPONENTS, stage_app, write_config
from blackthorn.settings.config import make_config, parse_setting, read_recipe
from blackthorn.strategies.reports import RoundReport

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 1800
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_SETTABLE = ("simulate", "cluster", "pilot", "audit", "sweep")


def _all_blocks() -> list[Block]:
    found = []
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        if other_test_of(path) is None:
            found += blocks_of(path, page)
    return found


BLOCKS = _all_blocks()


# What some blocks need before them; each is told the folder in which the block runs.


def _a_run(folder: Path) -> None:
    settings = {"num-server-rounds": 1, "report": False}
    options = {**settings, "output-dir": str(folder / "runs" / "my-run")}
    simulate(recipe_config(ROOT / "recipes" / "demo.toml", (), options), Console(quiet=True))


def _dead_run(folder: Path) -> None:
    """What a server that was killed after its first round leaves."""

    def kill(report: RoundReport) -> None:
        if report.server_round == 1:
            raise KeyboardInterrupt

    options = {"num-server-rounds": 3, "output-dir": str(folder / "runs" / "my-run")}
    config = recipe_config(ROOT / "recipes" / "demo.toml", (), options)
    with pytest.raises(KeyboardInterrupt):
        simulate(config, Console(quiet=True), observers=[kill])


def _posterior_runs(folder: Path) -> None:
    values = {
        "algorithm": "fa-ld",
        "model": "logistic",
        "num-server-rounds": 12,
        "local-lr": 1e-4,
        "num-clients": 3,
        "local-steps": 1,
        "report": False,
    }
    for number in (1, 2):
        chain = folder / "runs" / f"chain-{number}"
        simulate(make_config({**values, "output-dir": str(chain)}), Console(quiet=True))
    (folder / "runs" / "my-run").symlink_to("chain-1")
    _examples(folder)


def _finished_run(folder: Path) -> None:
    _a_run(folder)
    _examples(folder)


def _two_runs(folder: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.3)):
        place = {"output-dir": str(folder / "runs" / name)}
        options = {"num-server-rounds": 1, "report": False, "local-lr": rate, **place}
        simulate(recipe_config(ROOT / "recipes" / "demo.toml", (), options), Console(quiet=True))


def _examples(folder: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.random((20, 1, 8, 8), dtype=np.float32)
    np.savez(folder / "examples.npz", x=x, y=generator.integers(0, 10, 20))
    np.savez(folder / "elsewhere.npz", x=x[::-1])


def _own_data(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("ward-a", "ward-b"):
        x = generator.random((40, 64), dtype=np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=np.arange(40) % 10)


def _flower_project(folder: Path, **options: object) -> None:
    """A Flower project's model, and a grid of seven clients on which its ServerApp runs."""
    values = {"num-clients": 7, "model": "logistic", "local-steps": 1, **options}
    (folder / "prelude.py").write_text(
        "from blackthorn.settings.config import make_config\n"
        "from blackthorn.simulation.engine import EngineGrid\n"
        "from blackthorn.tasks.problem import load_problem\n"
        f"config = make_config({values})\n"
        "problem = load_problem(config)\n"
        "grid = EngineGrid(config, problem)\n"
        "class Net:\n"
        "    state_dict = staticmethod(problem.state)\n"
    )
    (folder / "epilogue.py").write_text("app(grid, None)\n")


def _private_project(folder: Path) -> None:
    """The same, of clients that train as DPFedAvg asks them to."""
    options = {"clip-norm": 1.0, "noise-multiplier": 1.0, "delta": 0.01, "local-lr": 0.1}
    _flower_project(folder, algorithm="dp-fedavg", **options)


def _own_code(folder: Path) -> None:
    """The files that docs/extend.md shows, each under the name in its first line."""
    for block in blocks_of(ROOT / "docs" / "extend.md", "docs/extend.md"):
        name = re.match(r"# (my_\w+\.py)\n", block.text)
        if name is not None:
            (folder / name[1]).write_text(block.text, encoding="utf-8")


SETUPS: dict[str, Callable[[Path], None]] = {
    "a-run": _a_run,
    "dead-run": _dead_run,
    "posterior-runs": _posterior_runs,
    "finished-run": _finished_run,
    "two-runs": _two_runs,
    "own-data": _own_data,
    "flower-project": _flower_project,
    "private-project": _private_project,
    "own-code": _own_code,
}


def _environment(folder: Path) -> dict[str, str]:
    """What a newcomer has: the package is installed, and the page's own files are at hand."""
    return {**os.environ, "PYTHONPATH": str(folder), "TERM": "dumb"}


def _blackthorn(words: list[str], folder: Path, exit_code: int = 0) -> None:
    """In this process, which has imported everything already."""
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemExit) as ended,
    ):
        patch.setattr(sys, "argv", ["blackthorn", *words])
        main()
    code = int(ended.value.code or 0)
    assert code == exit_code, f"blackthorn {shlex.join(words)}\n{printed.getvalue()}"


def _python(words: list[str], folder: Path, exit_code: int = 0) -> None:
    code, printed = run_script(words, folder, _environment(folder), SECONDS)
    assert code == exit_code, f"python {shlex.join(words)}\n{printed}"


def shell_commands(text: str) -> list[list[str]]:
    """The commands of a block, without comments; a backslash joins lines."""
    joined = text.replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [words for words in commands if words]


def check_make(words: list[str]) -> None:
    """A `make` command is not run here, CI does that: its targets and variables must exist."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, equals, _ = word.partition("=")
        if equals:
            assert re.search(rf"\b{re.escape(name)}\b", makefile), f"Makefile knows no {name}"
        else:
            pattern = rf"^{re.escape(name)}\s*:(?!=)"
            assert re.search(pattern, makefile, re.MULTILINE), f"Makefile has no target {name}"


def run_shell(block: Block, folder: Path) -> None:
    commands = shell_commands(block.text)
    assert commands, "the block holds no command"
    for number, (program, *words) in enumerate(commands):
        exit_code = block.exit_code if number == len(commands) - 1 else 0
        if program == "make":
            check_make(words)
        elif program == "blackthorn":
            _blackthorn(_made_short(words, block), folder, exit_code)
        elif program == "flwr":
            run_flower([program, *words], block.settings, folder)
        elif program in ("python", "python3"):
            _python(words, folder, exit_code)
        else:
            pytest.fail(
                f"{block.name}: nothing here knows how to run {program!r}; mark the block with "
                "<!-- test: not run because ... --> if it cannot be run"
            )


def _made_short(words: list[str], block: Block) -> list[str]:
    """With the block's settings. Plots take most of so short a run: two pages' blocks have them. A
    sweep's processes take longer to begin than it does here."""
    settings = list(block.settings)
    if words[0] == "simulate" and block.page not in ("README.md", "docs/report.md"):
        settings.append("report=false")
    if words[0] == "sweep":
        words = [*words, "--processes", "1"]
    if words[0] in _SETTABLE:
        words = [*words, *(word for setting in settings for word in ("--set", setting))]
    return words


def run_flower(command: list[str], settings: tuple[str, ...], folder: Path) -> None:
    """`flwr run .` against a SuperLink of its own, as Flower starts one; the run must complete.

    Flower takes a recipe or single keys, not both: the settings go into a copy of the recipes.
    """
    app = stage_app(ROOT, COMPONENTS, folder / "app")
    (app / "recipes").mkdir()
    changes = dict(parse_setting(setting) for setting in settings)
    for recipe in (ROOT / "recipes").glob("*.toml"):
        write_config({**read_recipe(recipe), **changes}, app / "recipes" / recipe.name)
    for attempt in range(RAY_STARTS):
        failure = _run_flower_once(command, app, folder / f"work-{attempt}")
        if not ray_did_not_start(failure):
            break
    assert not failure, failure


def _run_flower_once(command: list[str], app: Path, work: Path) -> str:
    """One attempt; what was printed where the run did not complete, empty where it did."""
    work.mkdir()
    with simulating_superlink(work) as (environment, _):
        done = subprocess.run(
            command, cwd=app, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    summaries = [json.loads(path.read_text()) for path in work.glob("runs/*/summary.json")]
    if [summary["status"] for summary in summaries] == ["completed"]:
        return ""
    return f"{done.stdout}{done.stderr}{(work / 'superlink.log').read_text()}{summaries}"


def run_block(block: Block, folder: Path) -> None:
    """Run or check one block in `folder`; fails for a language that nobody here knows."""
    if block.language == "python":
        prelude = folder / "prelude.py"
        before = prelude.read_text(encoding="utf-8") if prelude.exists() else ""
        epilogue = folder / "epilogue.py"
        after = epilogue.read_text(encoding="utf-8") if epilogue.exists() else ""
        (folder / "block.py").write_text(before + block.text + after, encoding="utf-8")
        _python(["block.py"], folder, block.exit_code)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language in ("", "sh", "bash", "console", "shell"):
        run_shell(block, folder)
    elif block.language == "text":
        assert block.text.strip()
    else:
        pytest.fail(f"{block.name}: nothing here knows how to check {block.language!r}")


def _parameter(block: Block) -> object:
    marks = [getattr(pytest.mark, mark) for mark in block.marks if mark != "data"]
    return pytest.param(block, id=block.name, marks=marks)


@pytest.mark.parametrize("block", [_parameter(b) for b in BLOCKS if not b.exempt])
def test_a_block_does_what_its_page_says(
    block: Block, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "data" in block.marks:
        request.getfixturevalue("data_dir")  # skips where there is none
    for name in ("recipes", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in block.setups:
        assert name in SETUPS, f"{block.name}: there is no set-up {name}: {', '.join(SETUPS)}"
        SETUPS[name](tmp_path)
    run_block(block, tmp_path)


def test_there_are_blocks_and_few_are_exempt() -> None:
    assert len(BLOCKS) >= 15
    exempt = [block for block in BLOCKS if block.exempt]
    assert len(exempt) <= len(BLOCKS) // 3, [block.name for block in exempt]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_that_is_tested_elsewhere_names_a_test_that_reads_it(path: Path) -> None:
    other = other_test_of(path)
    if other is not None:
        assert path.name in (ROOT / other).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


# The test itself: what would let a block slip by.


def _page(folder: Path, text: str) -> list[Block]:
    (folder / "page.md").write_text(text)
    return blocks_of(folder / "page.md", "page.md")


def test_all_kinds_of_blocks_are_found(tmp_path: Path) -> None:
    text = (
        "a\n\n    make demo\n\n- list\n\n  ```python\n  x = 1\n  ```\n\n> ~~~toml\n> a = 1\n> ~~~\n"
    )
    found = _page(tmp_path, text)
    assert [(b.language, b.text) for b in found] == [
        *(("", "make demo\n"), ("python", "x = 1\n"), ("toml", "a = 1\n"))
    ]


def test_markers_are_read_and_belong_to_one_block(tmp_path: Path) -> None:
    marker = "<!-- test: settings a=1 b=2; with a-run; deployment; fails with 2 -->\n\n"
    first, second = _page(tmp_path, f"{marker}```\nx\n```\n\n```\ny\n```\n")
    assert (first.settings, first.setups) == (("a=1", "b=2"), ("a-run",))
    assert (first.marks, first.exit_code) == (("deployment",), 2)
    assert second == Block("page.md", 7, "", "y\n")


@pytest.mark.parametrize(
    "marker",
    ["nonsense", "not run because", "not run because so", "settings", "with", "fails with x"],
)
def test_a_marker_that_says_nothing_is_an_error(tmp_path: Path, marker: str) -> None:
    with pytest.raises(BadMarker, match=r"page\.md:1"):
        _page(tmp_path, f"<!-- test: {marker} -->\n\n```\nx\n```\n")


def test_a_marker_without_a_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadMarker, match="followed by no block"):
        _page(tmp_path, "<!-- test: slow -->\n\nwords\n\n```\nx\n```\n")


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("", "make no-such-target\n", "no target no-such-target"),
        ("", "make demo NO_SUCH=1\n", "knows no NO_SUCH"),
        ("", "rm -rf everything\n", "knows how to run 'rm'"),
        ("", "# only words\n", "holds no command"),
        ("", "blackthorn simulate nowhere.toml\n", "nowhere.toml"),
        ("python", "raise SystemExit(3)\n", "block.py"),
        ("cobol", "x\n", "'cobol'"),
        ("toml", "a = \n", "Invalid value"),
        ("json", "{\n", "property name"),
    ],
)
def test_a_block_that_is_wrong_fails(
    tmp_path: Path, language: str, text: str, message: str
) -> None:
    wrong = (AssertionError, ValueError, pytest.fail.Exception)
    with pytest.raises(wrong, match=re.escape(message)):
        run_block(Block("page.md", 1, language, text), tmp_path)
