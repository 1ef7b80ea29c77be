"""The ledger's file: whatever leads to it, whoever else wants it, whatever is in it."""

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    FixedParticipation,
    FullParticipation,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
)
from blackthorn.strategies.ledger import LedgerInUse, read_charges
from blackthorn.strategies.participation import Participation
from blackthorn.strategies.privacy_plan import Neighbours


def plan() -> PrivacyPlan:
    return PrivacyPlan(ClipNorm(1.0), 2.0, 2, 100, PoissonParticipation(0.5))


def charge(path: Path, times: int = 1) -> None:
    """A run that charges `times` rounds."""
    ledger = Ledger(plan(), path)
    for _ in range(times):
        ledger.charge(plan().release())
    ledger.close()


def rounds(path: Path) -> int:
    return sum(count for _, count in read_charges(path))


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
    assert rounds(real) == rounds(there) == 3 + 2
    charge(real)
    assert rounds(there) == 3 + 3
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
    assert rounds(real) == 4


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
    assert rounds(tmp_path / "spent.json") == 2


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
    assert rounds(copy) == 3
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
    assert (rounds(tmp_path / "a.json"), rounds(tmp_path / "b.json")) == (1, 3)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system here")
def test_on_another_file_system(tmp_path: Path) -> None:
    away = Path("/dev/shm") / f"blackthorn-{os.getpid()}.json"
    (tmp_path / "spent.json").symlink_to(away)
    try:
        charge(away)
        charge(tmp_path / "spent.json")
        assert rounds(away) == 2
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
    assert rounds(path) == 2


def test_a_ledger_that_is_deleted_in_mid_run_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    ledger = Ledger(plan(), path)
    ledger.charge(plan().release())
    path.unlink()
    ledger.charge(plan().release())
    assert rounds(path) == 2


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
    assert rounds(path) == 2


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


# What is in it.

GOOD: dict[str, Any] = {
    "format": 1,
    "delta": 1e-5,
    "neighbours": "add-remove",
    "rounds": 2,
    "charges": [{"rounds": 2, "noise_multiplier": 2.0, "sample_rate": 0.5, "drawn": None}],
}


def bad_charges() -> Iterator[dict[str, Any]]:
    (good,) = GOOD["charges"]
    counts: tuple[Any, ...] = (-2, 0, 2.0, 2.5, "2", True, None, [], float("nan"), 10**400)
    for count in counts:
        yield {**good, "rounds": count}
    beyond = (0.0, 1.1e12, 1e200, 10**400)
    for multiplier in (-1.0, float("nan"), float("inf"), "2", True, None, *beyond):
        yield {**good, "noise_multiplier": multiplier}
    for rate in (-0.5, 0.0, 1.5, float("nan"), "1", True, None, 1e-17, 1e-300):
        yield {**good, "sample_rate": rate}
    for drawn in ([2, 4], [], 0, "", [2], [2, 1], [0, 4], [1.0, 4], [True, 4], [2, 4, 8], "24"):
        yield {**good, "drawn": drawn}
    for key in good:
        yield {name: value for name, value in good.items() if name != key}


@pytest.mark.parametrize(
    "change",
    [
        *({"charges": [bad]} for bad in bad_charges()),
        # Together they would add up to what is said, or to less than was spent.
        {"charges": [{**GOOD["charges"][0], "rounds": n} for n in (5, -3)]},
        {"rounds": 1},
        {"rounds": None},
        {"rounds": 2.5},
        {"charges": None},
        {"charges": {}},
        {"format": 2},
    ],
)
def test_what_no_run_could_have_written_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "spent.json"
    path.write_text(json.dumps(GOOD))
    assert Ledger(plan(), path).rounds == 2
    text = json.dumps({**GOOD, **change})
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"is damaged: |no privacy ledger|not a privacy ledger"
    ) as e:
        Ledger(plan(), path)
    assert "\n" not in str(e.value)
    assert path.read_text() == text


FIXED = FixedParticipation(2)


@pytest.mark.parametrize(
    ("neighbours", "participation", "charge", "allowed"),
    [
        ("add-remove", FullParticipation(), {}, True),
        ("zero-out", FullParticipation(), {}, True),
        ("zero-out", FIXED, {}, True),
        ("zero-out", FIXED, {"sample_rate": 1e-9}, False),
        ("zero-out", FIXED, {"drawn": [2, 4]}, False),
        ("replace-one", FullParticipation(), {}, True),
        ("replace-one", FIXED, {"drawn": [2, 4]}, True),
        ("replace-one", FIXED, {"drawn": [2, 4], "sample_rate": 0.5}, False),
        ("replace-one", FIXED, {"sample_rate": 0.5}, False),
        ("replace-one", FIXED, {"drawn": [2, 10**400]}, False),
    ],
)
def test_charges_are_those_of_its_neighbours(
    tmp_path: Path,
    neighbours: Neighbours,
    participation: Participation,
    charge: dict[str, Any],
    allowed: bool,
) -> None:
    """An amplification that these neighbours do not have would understate what was spent."""
    path = tmp_path / "spent.json"
    entry = {"rounds": 2, "noise_multiplier": 2.0, "sample_rate": 1.0, "drawn": None, **charge}
    path.write_text(json.dumps({**GOOD, "neighbours": neighbours, "charges": [entry]}))
    its_plan = PrivacyPlan(ClipNorm(1.0), 2.0, 4, 100, participation, neighbours=neighbours)
    if allowed:
        assert Ledger(its_plan, path).rounds == 2
        return
    with pytest.raises(ValueError, match="is damaged: ValueError") as caught:
        Ledger(its_plan, path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("noise_multiplier", [1.1e12, 1e200])
def test_a_plan_has_no_noise_that_its_ledger_would_refuse(noise_multiplier: float) -> None:
    with pytest.raises(ValueError, match=r"noise_multiplier = .* is not allowed: greater than 0"):
        PrivacyPlan(ClipNorm(1.0), noise_multiplier, 4, 100)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "", "{", "[]", "null", '{"format": 1}', "\x00" * 64]
)
def test_half_a_ledger_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spent.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="ledger"):
        Ledger(plan(), path)


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
