"""A Python script in a process of its own, a fork of one that has imported our libraries."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# What scripts that use Blackthorn import sooner or later; seconds of every new interpreter's time.
_LIBRARIES = ("blackthorn.launch.commands.simulate", "flwr.app", "flwr.serverapp")


def run_script(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """Exit code and output of `python WORDS` in `folder`; TimeoutError when it takes longer."""
    context = multiprocessing.get_context("forkserver")
    # Counts where the server has not begun yet.
    context.set_forkserver_preload(list(_LIBRARIES))
    printed = folder / "printed.txt"
    script = context.Process(target=_script, args=(list(words), folder, dict(environment), printed))
    script.start()
    script.join(seconds)
    if script.exitcode is None:
        script.kill()
        script.join()
        raise TimeoutError(f"python {' '.join(words)} took longer than {seconds} s")
    return script.exitcode, printed.read_text(encoding="utf-8")


def _script(words: list[str], folder: Path, environment: dict[str, str], printed: Path) -> None:
    """In the fork: what `python WORDS` does once it has begun."""
    stream = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, standard in ((1, sys.stdout), (2, sys.stderr)):
        standard.flush()
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.path[:0] = [str(folder), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(words[0], run_name="__main__")
