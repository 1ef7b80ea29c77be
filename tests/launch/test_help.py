"""Help of every command has an example that parses; completion works in a shell."""

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import blackthorn
from blackthorn.installation import CODE
from blackthorn.launch.cli import app


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all commands and groups of them, such as ("calibrate",) and ("calibrate", "dp")."""
    if path:
        yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


ROOT = typer.main.get_command(app)
PATHS = sorted(commands(ROOT))


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = ROOT
    for name in path:
        assert isinstance(command, TyperGroup)
        command = command.commands[name]
    return command


def test_the_commands_are_found() -> None:
    assert {("simulate",), ("cluster",), ("report",), ("calibrate", "dp")} <= set(PATHS)


def example_of(path: tuple[str, ...]) -> str:
    text = command_at(path).help or ""
    _, marker, example = text.partition("Example: ")
    assert marker, f"the help of {' '.join(path)} has no example"
    return " ".join(example.split())


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_the_example_of_every_command_parses(path: tuple[str, ...]) -> None:
    words = shlex.split(example_of(path))
    assert tuple(words[: len(path) + 1]) == ("blackthorn", *path)
    # Parses without running: unknown options, missing arguments and wrong types raise.
    command_at(path).make_context(path[-1], words[len(path) + 1 :])


def test_an_example_with_a_wrong_option_would_not_parse() -> None:
    with pytest.raises(Exception, match="No such option"):
        command_at(("simulate",)).make_context("simulate", ["recipe.toml", "--no-such-option"])


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_help_page_shows_its_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "Example: blackthorn" in result.output
    for parameter in command_at(path).params:
        said = getattr(parameter, "help", None)
        assert said or isinstance(parameter, click.Argument), f"{parameter.name} has no help"


@pytest.mark.parametrize("path", [(), *PATHS], ids=" ".join)
def test_h_is_help_everywhere(path: tuple[str, ...]) -> None:
    short, long = (CliRunner().invoke(app, [*path, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage: " in short.output
    assert short.output == long.output


def test_the_version_is_pyproject_s_and_the_command_tells_the_code_as_well(
    repository: Path,
) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert blackthorn.__version__ == project["version"]
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"blackthorn {CODE}\n")
    assert CODE.startswith(f"{blackthorn.__version__} (code ")


def test_the_first_page_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert all(path[0] in result.output for path in PATHS)
    assert "--install-completion" in result.output


def complete(words: str) -> list[str]:
    """What bash's completion would offer for the last of the words."""
    environment = {
        "_BLACKTHORN_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="blackthorn", env=environment).output.split()


def test_completion_offers_commands_options_and_keys() -> None:
    assert complete("blackthorn simu") == ["simulate"]
    assert "--output-dir" in complete("blackthorn simulate --out")
    keys = complete("blackthorn simulate recipe.toml --set num-cl")
    assert keys == ["num-classes=", "num-clients="]
    assert complete("blackthorn run recipe.toml --set num-cl") == keys


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_and_installed(
    repository: Path, tmp_path: Path, shell: str
) -> None:
    # Typer reads the variable when it is imported: in a process of its own.
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    for option in ("--show-completion", "--install-completion"):
        done = subprocess.run(
            [sys.executable, "-m", "blackthorn", option, shell],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "_BLACKTHORN_COMPLETE" in done.stdout or option == "--install-completion"
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_BLACKTHORN_COMPLETE" in text for text in written)


def test_who_follows_a_run_somewhere_else_need_not_wait_for_torch(repository: Path) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from blackthorn.launch.federation.app_bundle import bundle_own_code; "
        "from blackthorn.flower_port import control_api; "
        "from blackthorn.launch.commands import progress; "
        "from blackthorn.launch.federation import run_log, submission; "
        "bundle_own_code(Path(), {'attack': 'none'}, ['attack']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repository, timeout=60, check=True)


def test_the_program_itself_completes_and_is_quick_about_it(repository: Path) -> None:
    """Neither torch nor Flower may be loaded to complete a word or to show help."""
    code = (
        "import sys; import blackthorn.launch.cli as cli; "
        "assert not {'torch', 'flwr'} & set(sys.modules); cli.main()"
    )
    environment = {
        **os.environ,
        "_BLACKTHORN_COMPLETE": "complete_bash",
        "COMP_WORDS": "blackthorn simu",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["simulate"], done.stderr
