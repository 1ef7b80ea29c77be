"""A disk that is full: one line, exit code 1, and nothing that is in the way of the next start."""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from blackthorn.launch.commands import simulate as launched
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.recording.line_log import LineLog
from blackthorn.recording.run_folder import read_metrics, read_summary
from blackthorn.strategies.durable_file import replace_file

COMMAND = [sys.executable, "-m", "blackthorn"]
SMALL = {
    **{"algorithm": "gfedavg", "corrupt-fraction": 0, "num-byzantine": 0, "attack": "none"},
    **{"num-clients": 3, "num-server-rounds": 3, "state-every": 1, "report": "false"},
    **{"checkpoint-every": 0, "tensorboard": "false"},
}


def no_file_above(size: int) -> Callable[[], None]:
    """For a new process: the kernel lets no file grow beyond so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def goes_on(repository: Path, folder: Path, **settings: str) -> None:
    """The same run in this process and without a limit, which completes."""
    given = [f"{key}={value}" for key, value in {**SMALL, **settings}.items()]
    config = recipe_config(repository / "recipes" / "demo.toml", given, {"output-dir": str(folder)})
    assert launched.simulate(config, Console(quiet=True))["status"] == "completed"


def simulate(
    repository: Path, *arguments: str, limit: int | None = None
) -> subprocess.CompletedProcess[str]:
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    return subprocess.run(
        [*COMMAND, "simulate", "recipes/demo.toml", "--quiet", *settings, *arguments],
        cwd=repository,
        preexec_fn=None if limit is None else no_file_above(limit),
        capture_output=True,
        text=True,
        timeout=120,
    )


def parts(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.part"))


def test_a_state_that_cannot_be_written_fails_the_run_in_one_line(
    repository: Path, tmp_path: Path
) -> None:
    """The model of 20 KB does not fit, the first state does; the run goes on later."""
    folder = tmp_path / "run"
    told = ("--output-dir", str(folder), "--set", "report=true")
    done = simulate(repository, *told, limit=8000)
    assert done.returncode == 1, done.stderr
    failed, go_on = done.stderr.splitlines()
    assert failed.startswith(f"failed: File too large: {folder}/state/round-00001-")
    assert go_on.endswith(f"--set resume={folder}")
    assert parts(tmp_path) == []
    summary = read_summary(folder)
    assert summary is not None
    # The summary is released: it names the file by its place in the run folder.
    reason = failed.removeprefix("failed: ").replace(f"{folder}/", "")
    assert (summary["status"], summary["reason"]) == ("failed", reason)
    goes_on(repository, folder, resume=str(folder), report="true")
    assert [entry["round"] for entry in read_metrics(folder)] == [0, 1, 2, 3]


def test_a_run_that_cannot_begin_leaves_its_folder_to_the_next(
    repository: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = simulate(repository, "--output-dir", str(folder), limit=100)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr == f"failed: File too large: {folder}/config.toml\n"
    assert parts(tmp_path) == []
    goes_on(repository, folder)


def test_a_line_that_cannot_be_written_is_tried_once(tmp_path: Path) -> None:
    """Python would try it again when the file is closed, and complain in lines of its own."""
    program = (
        "import pathlib, sys; from blackthorn.recording.line_log import LineLog\n"
        "log = LineLog(pathlib.Path(sys.argv[1]))\n"
        "try: log.append({'round': 1, 'text': 'x' * 5000})\n"
        "except OSError as error: print(error.strerror, error.filename)\n"
    )
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        preexec_fn=no_file_above(1000),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (f"File too large {path}\n", "")
    # What was written of it is torn, and dropped when the run goes on.
    log = LineLog(path)
    assert not log.cut_after(1)
    log.append({"round": 1})
    log.close()
    assert json.loads(path.read_text()) == {"round": 1}


def test_the_old_file_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    replace_file(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            replace_file(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_tmpdir_that_cannot_be_used_is_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from blackthorn.launch.cli import main

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    arguments = [
        "cluster",
        str(repository / "recipes/demo.toml"),
        "--quiet",
        "--set",
        "report=false",
    ]
    monkeypatch.setattr(
        sys, "argv", ["blackthorn", *arguments, "--output-dir", str(tmp_path / "run")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"failed: No such file or directory: {tmp_path}/gone/blackthorn-")
    assert said.count("\n") == 1


TINY = 'mount -t tmpfs -o size=4m tmpfs "$1" && shift && exec "$@"'


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "-Urm", "sh", "-c", TINY, "sh", folder, "true"]
        return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no file system of one's own can be mounted here")
def test_a_server_on_a_full_disk_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [
        *COMMAND,
        "server",
        "--host",
        "127.0.0.1",
        "--insecure",
        "--state",
        str(disk / "state"),
    ]
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", TINY, "sh", str(disk), *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"failed: the disk of --state {disk}/state is full: 4 MiB are left, 16 are needed\n"
    )
