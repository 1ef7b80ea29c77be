"""What CONTRIBUTING.md and the hooks before a commit say is so."""

import re
import subprocess
from pathlib import Path

import yaml


def test_the_hooks_run_the_checks_of_make_lint_by_programs_that_are_there(repository: Path) -> None:
    settings = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())
    (local,) = settings["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    hooks = {tuple(hook["entry"].split()[:2]) for hook in local["hooks"]}
    makefile = (repository / "Makefile").read_text()
    recipe = re.search(r"(?m)^lint:.*\n((?:\t.*\n)+)", makefile)
    assert recipe is not None
    checks = {
        tuple(line.replace("$(BIN)", ".venv/bin").split()[:2]) for line in recipe[1].splitlines()
    }
    assert hooks == checks


def test_contributing_names_files_that_exist(repository: Path) -> None:
    text = (repository / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.\w+)`", text)
    assert len(named) > 10
    assert [name for name in named if not (repository / name).exists()] == []


def test_contributing_has_a_row_for_every_file_that_tests_share(repository: Path) -> None:
    named = set(
        re.findall(r"`(tests/harness/\w+\.py)`", (repository / "CONTRIBUTING.md").read_text())
    )
    there = (repository / "tests" / "harness").glob("*.py")
    assert {path.relative_to(repository).as_posix() for path in there} == named


def test_the_tests_on_the_newest_flower_are_there(repository: Path) -> None:
    asked = ("make", "-n", "test-newest-flower")
    said = subprocess.run(asked, cwd=repository, capture_output=True, text=True, check=True).stdout
    named = re.findall(r"tests/[\w/]+\.py", said)
    assert len(named) > 20
    assert [name for name in named if not (repository / name).exists()] == []
