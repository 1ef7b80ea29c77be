"""What is in a ledger's file: nothing but what a run could have written."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from charged_ledgers import plan

from blackthorn.strategies import (
    ClipNorm,
    FixedParticipation,
    FullParticipation,
    Ledger,
    PrivacyPlan,
)
from blackthorn.strategies.ledger_file import Entry, begins_with, with_rounds
from blackthorn.strategies.participation import Participation
from blackthorn.strategies.privacy_plan import Neighbours
from blackthorn.strategies.release import Release

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
    for link in ("apart", "unknown"):
        yield {**good, "rounds": 0, "link": link}
    for rounds in (False, 0.0, -1, "0", None):
        yield {**good, "rounds": rounds, "link": "open"}
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


def test_a_ledger_begins_with_what_it_held_before_more_was_charged_or_asked() -> None:
    """Against all ways that lead from one content to another in six steps."""
    open_link = Release(2.0, link="open")
    steps = [(Release(2.0), 1), (open_link, 0), (open_link, 1)]

    def after(way: tuple[tuple[Release, int], ...], entries: list[Entry]) -> list[Entry]:
        for release, rounds in way:
            entries = with_rounds(entries, release, "a" * 16, rounds)
        return entries

    def ways(most: int) -> Iterator[tuple[tuple[Release, int], ...]]:
        for length in range(most + 1):
            yield from product(steps, repeat=length)

    contents = {tuple(after(way, [])) for way in ways(3)}
    assert len(contents) > 20
    for held in contents:
        reached = {tuple(after(way, [*held])) for way in ways(4)}
        for content in contents:
            assert begins_with(content, held) == (content in reached)


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
