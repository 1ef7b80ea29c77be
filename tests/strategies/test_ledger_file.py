"""The ledger's file: whatever leads to it, and whoever else wants it."""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from charged_ledgers import charge, plan, rounds_in

from blackthorn.strategies import (
    DPFedAvg,
    Ledger,
)
from blackthorn.strategies.ledger import LedgerInUse

# What leads to it.


def symlink(there: Path, real: Path) -> None:
    there.symlink_to(real)


def chain(there: Path, real: Path) -> None:
    between = there.with_name("between.json")
    between.symlink_to(real)
    there.symlink_to(between)


def folder(there: Path, real: Path) -> None:
    shutil.rmtree(there.parent)
    there.parent.symlink_to(real.parent, target_is_directory=True)


@pytest.mark.parametrize("lead", [symlink, chain, folder])
def test_every_name_of_a_ledger_is_charged(
    tmp_path: Path, lead: Callable[[Path, Path], None]
) -> None:
    real, there = tmp_path / "real" / "spent.json", tmp_path / "there" / "spent.json"
    for path in (real, there):
        path.parent.mkdir()
    charge(real, 3)
    lead(there, real)
    charge(there, 2)
    assert rounds_in(real) == rounds_in(there) == 3 + 2
    charge(real)
    assert rounds_in(there) == 3 + 3
    # Through one name as through the other it is one run's alone.
    one, other = Ledger(plan(), real), Ledger(plan(), there)
    one.charge(plan().release())
    with pytest.raises(LedgerInUse, match="in use by another run"):
        other.charge(plan().release())


@pytest.mark.parametrize("lead", [symlink, chain, folder])
def test_a_link_to_a_ledger_that_is_not_there_begins_none(
    tmp_path: Path, lead: Callable[[Path, Path], None]
) -> None:
    """Its disk is not mounted, for example: all that was spent would be forgotten."""
    real, there = tmp_path / "real" / "spent.json", tmp_path / "there" / "spent.json"
    for path in (real, there):
        path.parent.mkdir()
    charge(real, 3)
    lead(there, real)
    real.parent.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"is a link to .*, which is not there") as caught:
        Ledger(plan(), there)
    assert "\n" not in str(caught.value)
    assert not real.parent.exists()
    (tmp_path / "away").rename(real.parent)
    charge(there)
    assert rounds_in(real) == 4


def test_a_circle_of_links_and_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("a", "in a circle"), ("pipe", "not a file"), (".", "not a file")):
        with pytest.raises(ValueError, match=words) as caught:
            Ledger(plan(), tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_second_hard_link_is_refused(tmp_path: Path) -> None:
    """The first charge would leave it behind with what had been spent before."""
    charge(tmp_path / "spent.json")
    os.link(tmp_path / "spent.json", tmp_path / "second.json")
    for name in ("spent.json", "second.json"):
        with pytest.raises(ValueError, match=r"has 2 names \(hard links\)"):
            Ledger(plan(), tmp_path / name)
    (tmp_path / "second.json").unlink()
    charge(tmp_path / "spent.json")
    assert rounds_in(tmp_path / "spent.json") == 2


# Copies.


def test_a_copy_is_not_continued_beside_its_original(tmp_path: Path) -> None:
    original, copy = tmp_path / "spent.json", tmp_path / "copy.json"
    charge(original, 2)
    shutil.copy(original, copy)
    charge(original)
    with pytest.raises(ValueError, match=f"{copy} is a copy of {original}, which is still there"):
        Ledger(plan(), copy)
    # Where the original is gone it has been moved, and from then on the new place counts.
    original.unlink()
    charge(copy)
    assert rounds_in(copy) == 3
    shutil.copy(copy, original)
    with pytest.raises(ValueError, match=f"{original} is a copy of {copy}"):
        Ledger(plan(), original)


def _damaged(original: Path) -> None:
    original.write_text("{")


def _link_to_nothing(original: Path) -> None:
    original.unlink()
    original.symlink_to(original.with_name("not-mounted.json"))


def _folder(original: Path) -> None:
    original.unlink()
    original.mkdir()


@pytest.mark.parametrize("spoil", [_damaged, _link_to_nothing, _folder])
def test_a_copy_whose_original_is_there_and_cannot_be_read_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    original, copy = tmp_path / "spent.json", tmp_path / "copy.json"
    charge(original, 2)
    shutil.copy(original, copy)
    spoil(original)
    with pytest.raises(ValueError, match=f"{copy} was {original} before, and nobody knows") as told:
        Ledger(plan(), copy)
    assert "\n" not in str(told.value)
    # Of the original itself it is no question.
    assert Ledger(plan(), tmp_path / "another.json").moved is None


def test_a_ledger_that_was_elsewhere_before_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original, moved = tmp_path / "spent.json", tmp_path / "moved.json"
    charge(original)
    original.rename(moved)
    told = Ledger(plan(), moved).moved
    assert told is not None and f"ledger {moved} was elsewhere before ({original})" in told
    charge(moved)
    assert caplog.messages.count(told) == 1
    assert Ledger(plan(), moved).moved is None


def test_another_ledger_in_the_old_place_is_no_original(tmp_path: Path) -> None:
    charge(tmp_path / "a.json", 2)
    (tmp_path / "a.json").rename(tmp_path / "b.json")
    charge(tmp_path / "a.json")
    charge(tmp_path / "b.json")
    assert (rounds_in(tmp_path / "a.json"), rounds_in(tmp_path / "b.json")) == (1, 3)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system here")
def test_on_another_file_system(tmp_path: Path) -> None:
    away = Path("/dev/shm") / f"blackthorn-{os.getpid()}.json"
    (tmp_path / "spent.json").symlink_to(away)
    try:
        charge(away)
        charge(tmp_path / "spent.json")
        assert rounds_in(away) == 2
    finally:
        away.unlink(missing_ok=True)


# Two writers.


def test_nothing_that_can_be_deleted_lets_a_second_run_in(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    first = Ledger(plan(), path)
    first.charge(plan().release())
    for other in tmp_path.iterdir():
        if other != path:
            other.unlink()
    second = Ledger(plan(), path)
    with pytest.raises(LedgerInUse, match="in use by another run"):
        second.charge(plan().release())
    first.charge(plan().release())
    first.close()
    assert rounds_in(path) == 2


def test_a_ledger_that_is_deleted_in_mid_run_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    ledger = Ledger(plan(), path)
    ledger.charge(plan().release())
    path.unlink()
    ledger.charge(plan().release())
    assert rounds_in(path) == 2


def test_another_ledger_in_its_place_ends_the_run(tmp_path: Path) -> None:
    """Nothing is released that the file which is there does not hold."""
    path = tmp_path / "spent.json"
    first = Ledger(plan(), path)
    first.charge(plan().release())
    path.unlink()
    second = Ledger(plan(), path)
    second.charge(plan().release())
    with pytest.raises(LedgerInUse, match="was replaced by another while this run went on"):
        first.charge(plan().release())
    second.charge(plan().release())
    assert rounds_in(path) == 2


def test_two_runs_that_both_begin_a_ledger(tmp_path: Path) -> None:
    first, second = (Ledger(plan(), tmp_path / "spent.json") for _ in range(2))
    first.charge(plan().release())
    first.close()
    with pytest.raises(LedgerInUse, match="charged by another run meanwhile"):
        second.charge(plan().release())


class Untouched:
    """A grid that nobody may use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_a_ledger_in_use_is_known_before_any_client_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    first = Ledger(plan(), path)
    first.charge(plan().release())
    with pytest.raises(LedgerInUse, match="in use by another run"):
        DPFedAvg(plan(), ledger=path).start(Untouched(), None, num_rounds=1)


def test_where_nothing_can_be_locked_nothing_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        del descriptor, operation
        raise OSError(37, "No locks available")

    charge(tmp_path / "spent.json")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LedgerInUse, match="cannot be kept there: No locks available"):
        charge(tmp_path / "spent.json")


# Who may read it.


def test_it_is_its_owners_from_the_first_byte_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "spent.json"
    modes: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}")
        modes.append((synced.readlink().name, mode(synced)))
        real(descriptor)

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "fsync", fsync)
        charge(path, 2)
        path.chmod(0o666)
        charge(path)
    finally:
        os.umask(before)
    assert {m for name, m in modes if name != "new"} == {0o600}
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
