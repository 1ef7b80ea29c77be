"""`blackthorn server` and `blackthorn client` as processes of their own, and how to end them."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from process_watch import until

COMMAND = [sys.executable, "-m", "blackthorn"]


@dataclass
class Started:
    """A program that runs, with its output in a file. `prefix` is how it enters a namespace."""

    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, text: str, seconds: float = 240.0) -> None:
        """Wait until it has said so; AssertionError with its output if it does not."""
        try:
            until(lambda: text in self.text() or self.process.poll() is not None, seconds)
            assert text in self.text()
        except AssertionError:
            raise AssertionError(
                f"{self.output.name} never said {text!r}:\n{self.text()}"
            ) from None

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


@dataclass
class Bench:
    """A folder in which commands are run and programs started; all are ended by `end`."""

    folder: Path
    started: list[Started] = field(default_factory=list)

    def call(
        self, *arguments: object, prefix: Sequence[str] = (), seconds: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `blackthorn ARGUMENTS` to its end."""
        return self.call_program([*prefix, *COMMAND, *map(str, arguments)], seconds)

    def call_program(
        self, command: Sequence[str], seconds: float = 180.0
    ) -> subprocess.CompletedProcess[str]:
        """Run any command to its end."""
        return subprocess.run(
            command,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def start(self, name: str, *arguments: object, prefix: Sequence[str] = ()) -> Started:
        """Start `blackthorn ARGUMENTS`."""
        return self.start_program(name, [*prefix, *COMMAND, *map(str, arguments)])

    def start_program(self, name: str, command: Sequence[str]) -> Started:
        """Start any command."""
        output = self.folder / f"{name}.out"
        with output.open("ab") as stream:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Started(process, output))
        return self.started[-1]

    def end(self) -> None:
        """Stop everything, the last first."""
        for one in reversed(self.started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.stop()
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()


@contextlib.contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    """A bench whose programs have ended when the block is left."""
    one = Bench(folder)
    try:
        yield one
    finally:
        one.end()
