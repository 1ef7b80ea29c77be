"""Who may read what a run leaves, whatever the umask, and what the files' times tell."""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from digits_runs import EVERYTHING, configuration
from killed_runs import die_after
from rich.console import Console

from blackthorn.launch.cli import finish
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.service import service
from blackthorn.recording.folder_place import RELEASED, WITHHELD, create_folder
from blackthorn.recording.privacy import privacy_of_dead_run
from blackthorn.recording.run_folder import read_summary, write_failure
from blackthorn.reporting.run_report import publish
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError
from blackthorn.strategies import NotEnoughClients
from blackthorn.strategies.reports import RoundReport

ROUNDS = 4
WHOLE: dict[str, Any] = {**EVERYTHING, "num_server_rounds": ROUNDS}
Observe = Callable[[RoundReport], None]


def run(folder: Path, *observers: Observe, **options: Any) -> dict[str, Any]:
    config = configuration(folder, **{**WHOLE, **options})
    return simulate(config, Console(quiet=True), observers=observers)


def killed(folder: Path, after: int, *observers: Observe, **options: Any) -> None:
    die_after(after, folder, {**WHOLE, **options}, observers=observers)


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Whatever is not asked for otherwise may be read and written by everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def kind(folder: Path, path: Path) -> str:
    """Whether a file may be released, by its place in the run's folder."""
    top = folder / path.relative_to(folder).parts[0]
    kinds = {"released": RELEASED, "withheld": WITHHELD}
    (found,) = (k for k, patterns in kinds.items() if any(top.match(p) for p in patterns))
    return found


def check_modes(folder: Path) -> set[str]:
    """The top-level names that were looked at."""
    assert mode(folder) == 0o700
    for path in folder.rglob("*"):
        if kind(folder, path) == "withheld":
            assert (path, oct(mode(path))) == (path, oct(0o700 if path.is_dir() else 0o600))
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("no_umask")
def test_what_is_not_released_is_its_owners_from_its_creation_and_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    created: dict[str, set[int]] = {}
    real = os.open

    def watched(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        descriptor = real(path, flags, *arguments, **options)
        if flags & os.O_CREAT:
            # A part has the name of what it becomes.
            name = re.sub(r"^\.(.*)\.part$", r"\1", Path(path).name)
            created.setdefault(name, set()).add(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", watched)

    def look(report: RoundReport) -> None:
        del report
        assert {"operator.jsonl", "ledger.json", "state"} <= check_modes(folder)

    killed(folder, 2, look)
    check_modes(folder)
    # An earlier version's folder, or somebody's chmod -R.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    killed(folder, 3, look, resume=str(folder))
    check_modes(folder)
    run(folder, look, resume=str(folder))
    check_modes(folder)
    # What goes by os.open is all there is, and nothing was wider for a moment.
    withheld = {name: modes for name, modes in created.items() if not is_released(name)}
    states = {name for name in withheld if name.startswith("round-0000")}
    assert {f"round-0000{n}" for n in range(ROUNDS + 1)} == {name[:11] for name in states}
    assert withheld.keys() - states == {"operator.jsonl", "ledger.json"}
    assert all(modes <= {0o600} for name, modes in withheld.items() if name in states)
    assert withheld["ledger.json"] == {0o600}
    # The resumed run found it wider, and what it opened was narrowed at once.
    assert withheld["operator.jsonl"] <= {0o600, 0o666}


def is_released(name: str) -> bool:
    return re.fullmatch(r"round-\d{5}\.safetensors", name) is not None or any(
        Path(name).match(pattern) for pattern in (*RELEASED, "final.safetensors", "*.png")
    )


DP_SGD = {"local_dp_sgd": True, "dp_sgd_sample_rate": 0.2, "batch_size": 10}


NOISE_AT_CLIENTS = {"noise_location": "client"}
CLAIMS: dict[str, dict[str, Any]] = {
    "central": {},
    "central and local": NOISE_AT_CLIENTS,
    "local alone": {**NOISE_AT_CLIENTS, "aggregator": "median"},
    "examples": {
        **DP_SGD,
        "algorithm": "gfedavg",
        "noise_multiplier": 0.0,
        "clip_norm": 0.0,
        "dp_sgd_noise_multiplier": 1.0,
    },
}


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
def test_under_every_claim_the_folder_and_what_is_withheld_are_their_owner_s(
    tmp_path: Path, claim: dict[str, Any]
) -> None:
    def withheld(folder: Path) -> set[str]:
        assert mode(folder) == 0o700
        found = [path for pattern in WITHHELD for path in folder.glob(pattern)]
        for path in [*found, *(inside for top in found for inside in top.rglob("*"))]:
            assert (path, oct(mode(path))) == (path, oct(0o700 if path.is_dir() else 0o600))
        return {path.name for path in found}

    killed(tmp_path / "run", 2, lambda _: None, **claim)
    assert "state" in withheld(tmp_path / "run")
    (tmp_path / "run").chmod(0o777)
    run(tmp_path / "run", resume=str(tmp_path / "run"), **claim)
    withheld(tmp_path / "run")


@pytest.mark.usefixtures("no_umask")
def test_without_a_claim_states_are_withheld_and_the_rest_is_as_the_umask_says(
    tmp_path: Path,
) -> None:
    def look(report: RoundReport) -> None:
        del report
        assert mode(tmp_path / "run" / "state") == 0o700
        assert {mode(path) for path in (tmp_path / "run" / "state").iterdir()} == {0o600}

    run(tmp_path / "run", look, algorithm="gfedavg", noise_multiplier=0.0, clip_norm=0.0)
    assert mode(tmp_path / "run") == 0o777
    assert mode(tmp_path / "run" / "metrics.jsonl") == 0o666
    assert mode(tmp_path / "run" / "checkpoints" / "final.safetensors") == 0o666


def test_every_file_is_on_the_list_of_the_privacy_page(tmp_path: Path, repository: Path) -> None:
    """A run with everything on leaves nothing of which the page does not say whether it may be
    handed on."""
    page = (repository / "docs" / "privacy.md").read_text()
    run(tmp_path)
    for path in tmp_path.rglob("*"):
        kind(tmp_path, path)
    rows = dict(re.findall(r"^\| `([^`]+)` \| (yes|no) \|", page, re.MULTILINE))
    listed = dict.fromkeys(RELEASED, "yes") | dict.fromkeys(WITHHELD, "no")
    assert {name.rstrip("/"): said for name, said in rows.items()} == listed


def test_a_folder_that_others_read_and_use_is_refused(tmp_path: Path) -> None:
    """Its mode is not the run's to change, and the run's own files would lie open in it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds other files, and others may read it") as caught:
        run(shared)
    assert "\n" not in str(caught.value)
    assert mode(shared) == 0o755
    (shared / "notes.txt").unlink()
    run(shared)
    assert mode(shared) == 0o700


@pytest.mark.usefixtures("no_umask")
def test_what_a_services_programs_write_is_its_users(tmp_path: Path) -> None:
    """Flower's store holds every message: also in a folder that was there, and open."""
    tmp_path.chmod(0o777)
    write = "from pathlib import Path; Path('store.db').touch(); Path('logs').mkdir(exist_ok=True)"
    with service(tmp_path / "logs", tmp_path, warm=False, stop_order=[]):
        subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=True, timeout=60)
    assert (mode(tmp_path / "store.db"), mode(tmp_path / "logs")) == (0o600, 0o700)
    (tmp_path / "after").touch()
    assert mode(tmp_path / "after") == 0o666


# Times.


def times(folder: Path) -> set[int]:
    """When what may be released was written, to the nanosecond."""
    paths = [path for path in folder.rglob("*") if kind(folder, path) == "released"]
    return {path.stat().st_mtime_ns for path in (folder, *paths)}


def test_no_files_time_tells_how_long_a_round_took(tmp_path: Path) -> None:
    seen: list[set[int]] = []

    def look(report: RoundReport) -> None:
        if report.server_round:
            seen.append(times(tmp_path / "run"))

    killed(tmp_path / "run", 2, look)
    seen.append(times(tmp_path / "run"))
    run(tmp_path / "run", look, resume=str(tmp_path / "run"))
    seen.append(times(tmp_path / "run"))
    (began,) = seen[-1]
    # All the time, also while it ran, and after a kill; the resumed run began when it first did.
    assert seen == [{began}] * len(seen)
    assert len(seen) == ROUNDS + 2


def test_no_files_time_tells_when_a_killed_run_s_command_wrote_its_end(tmp_path: Path) -> None:
    killed(tmp_path, 2)
    config = configuration(tmp_path, **WHOLE)
    assert write_failure(tmp_path, config, "killed", privacy_of_dead_run(config, tmp_path))
    publish(tmp_path)
    assert len(times(tmp_path)) == 1


def test_how_long_a_private_run_took_is_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one round it is the time that its slowest client took."""
    summary = run(tmp_path / "private", num_server_rounds=1)
    assert summary["wall_seconds"] is None
    assert read_summary(tmp_path / "private") == summary
    assert "wall time" not in (tmp_path / "private" / "report.html").read_text()
    finish(summary)
    assert "completed: 1 rounds, accuracy" in capsys.readouterr().out
    unclaimed = run(tmp_path / "unclaimed", claim_privacy=False)
    assert unclaimed["wall_seconds"] > 0
    finish(unclaimed)
    assert f"in {unclaimed['wall_seconds']:.1f} s" in capsys.readouterr().out


def test_a_private_run_says_where_rejections_are_whether_or_not_there_are_any(
    tmp_path: Path,
) -> None:
    for private in (True, False):
        config = configuration(tmp_path / str(private), **WHOLE, claim_privacy=private)
        told = " ".join(prepare(config).notes)
        assert ("is told in the run folder's operator.jsonl alone" in told) == private


def test_the_summary_of_a_private_run_does_not_say_who_was_missing(tmp_path: Path) -> None:
    def missing(report: RoundReport) -> None:
        del report
        raise NotEnoughClients("1 of 4 clients connected within 120 s; missing: 1, 2, 3")

    for name, private in (("private", True), ("unclaimed", False)):
        with pytest.raises(NotEnoughClients):
            run(tmp_path / name, missing, claim_privacy=private)
        summary = read_summary(tmp_path / name)
        assert summary is not None
        assert ("missing: 1, 2, 3" in summary["reason"]) == (not private)


def test_a_folder_that_is_somebody_elses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, wanted: int) -> None:
        del path, wanted
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(ConfigError, match=r"output-dir = .* cannot be written: Operation not perm"):
        create_folder(tmp_path, configuration(tmp_path, **WHOLE))
