"""The file of a ledger, a run's or a client's: JSON, behind its links, and no copy of another."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from .accounting import Charge, Release
from .release import LEAST_RATE, MOST, SEEN, Link

FORMAT = 1
_RUN = re.compile(r"[0-9a-f]{16}")


class Entry(NamedTuple):
    """Rounds in a row that `run` was charged for; "" is an earlier version, which named no run.

    No rounds: over that link, an open one, clients were asked for a round that is not charged.
    """

    release: Release
    rounds: int
    run: str = ""


def with_rounds(
    entries: Sequence[Entry], release: Release, run: str, rounds: int = 1
) -> list[Entry]:
    """`entries` and more rounds: equal ones in a row are counted together, run by run."""
    last = entries[-1] if entries else None
    if last is not None and (last.release, last.run) == (release, run):
        return [*entries[:-1], Entry(release, last.rounds + rounds, run)]
    return [*entries, Entry(release, rounds, run)]


def begins_with(entries: Sequence[Entry], held: Sequence[Entry]) -> bool:
    """Whether `entries` are what may become of `held` by more rounds."""
    start = [*entries[: len(held)]]
    if start and len(start) == len(held):
        start[-1] = start[-1]._replace(rounds=min(start[-1].rounds, held[-1].rounds))
    return start == [*held]


def charges_of(entries: Sequence[Entry]) -> list[Charge]:
    """What the entries cost, in order. Equal rounds of clients that take turns are counted together
    where they came one after the other in their run, whoever else charged in between: each run has
    dealt its own groups, and of n rounds that others lie between a client may be in more than
    ⌈n/b⌉. Where their links differ, by the least closed."""
    found: list[Charge] = []
    # Where in `found` the last rounds of a run are.
    last: dict[str, int] = {}
    for entry in entries:
        release, at = entry.release, last.get(entry.run)
        known, rounds = (release, 0) if at is None else found[at]
        if at is None or release.groups == 1 or replace(known, link=release.link) != release:
            last[entry.run] = len(found)
            found.append((release, entry.rounds))
            continue
        link = max(known.link, release.link, key=get_args(Link).index)
        found[at] = (replace(release, link=link), rounds + entry.rounds)
    return found


def load(path: Path) -> dict[str, Any]:
    """What is in it. Raises ValueError, one line, for a file that is no ledger."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"ledger {path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a privacy ledger of format {FORMAT}")
    return content


def refuse_copy(content: dict[str, Any], path: Path) -> None:
    """Two copies that are both continued would each hold half of what was spent.

    Raises ValueError for one of several hard links, and where the file that it was copied from, by
    the "path" and "id" in its `content`, is still there, or what is there cannot be read.
    """
    names = path.stat().st_nlink
    if names > 1:
        raise ValueError(
            f"ledger {path} has {names} names (hard links), of which only one would be kept up to "
            "date: remove the others"
        )
    original = Path(str(content.get("path", path)))
    try:
        if not behind_links(original).exists() or original.samefile(path):
            # The second: it is there under another name of its folder.
            return
        is_copy = load(original).get("id") == content.get("id")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"ledger {path} was {original} before, and nobody knows whether that is continued, "
            f"too: {error}; put it right, or remove it if it was never charged after the copy"
        ) from None
    if is_copy:
        raise ValueError(
            f"ledger {path} is a copy of {original}, which is still there: name that one, or "
            "remove it if it was never charged after it was copied"
        )


def was_elsewhere(content: dict[str, Any], path: Path) -> str | None:
    """What to tell of a ledger, no copy by `refuse_copy`, that had another place when it was last
    charged, else None: whether it was moved, or what it was copied from is continued on another
    machine, nobody can know."""
    original = Path(str(content.get("path", path)))
    if original == path or (original.exists() and original.samefile(path)):
        return None
    return (
        f"ledger {path} was elsewhere before ({original}); if that, or another copy, is continued, "
        "the figures of both are too small"
    )


def behind_links(path: Path) -> Path:
    """The file itself: a link would be replaced by the first charge, and the file left behind.

    Raises ValueError where there is something else than a file, and for a link to what is not
    there: whoever made it had a ledger, on a disk that is not mounted for example, and a new one
    would begin with nothing spent.
    """
    try:
        real = path.resolve()
        lost = [one for one in (path, *path.parents) if one.is_symlink() and not one.exists()]
        if lost:
            raise ValueError(
                f"ledger {path} cannot be read: {lost[0]} is a link to {lost[0].resolve()}, which "
                "is not there; put it back, or name the file itself where a new ledger is to begin"
            )
        if real.exists() and not real.is_file():
            raise ValueError(f"ledger {path} is not a file")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links lead in a circle"
        raise ValueError(f"ledger {path} cannot be read: {reason}") from None
    return real


def begins_anew(path: Path) -> str | None:
    """What to tell where a ledger that is named is not there yet, else None."""
    if path.exists():
        return None
    return f"ledger {path} does not exist: a new one begins there, with nothing spent"


def charge_entry(charge: Charge) -> dict[str, Any]:
    """A charge as a ledger's file holds it."""
    release, count = charge
    return {
        "rounds": count,
        "noise_multiplier": release.noise_multiplier,
        "sample_rate": release.sample_rate,
        "drawn": list(release.drawn) if release.drawn else None,
        **({} if release.shares == "unknown" else {"noise_shares": release.shares}),
        **({} if release.link == "unknown" else {"link": release.link}),
        **({} if release.groups == 1 else {"groups": release.groups}),
        **({"concentrated": True} if release.concentrated else {}),
    }


def check_releases(releases: Sequence[Release], neighbours: object) -> None:
    """Raises ValueError for what no plan for these neighbours is charged."""
    if neighbours not in ("add-remove", "zero-out", "replace-one"):
        raise ValueError(f"neighbours = {neighbours!r:.40}")
    for release in releases:
        if neighbours != "add-remove" and release.sample_rate < 1:
            raise ValueError(f"sample_rate = {release.sample_rate} with neighbours = {neighbours}")
        if neighbours != "replace-one" and release.drawn is not None:
            raise ValueError(f"drawn = {list(release.drawn)} with neighbours = {neighbours}")
        if release.noise_multiplier == 0:
            raise ValueError("noise_multiplier = 0")


def run_of(entry: dict[str, Any]) -> str:
    """The run that an entry of a ledger's file names. Raises ValueError for what is no run."""
    run = entry.get("run", "")
    if run != "" and not (isinstance(run, str) and _RUN.fullmatch(run)):
        raise ValueError(f"run = {run!r:.40}")
    return run


def read_charge(entry: dict[str, Any]) -> Charge:
    """What `charge_entry` wrote, or an earlier version, which did not say who drew the noise, or
    what clients see of one another.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    drawn = entry["drawn"]
    if drawn is not None:
        size, population = drawn
        drawn = _whole(size, "drawn"), _whole(population, "drawn")
    z, rate = (_number(entry[key], key) for key in ("noise_multiplier", "sample_rate"))
    if rate < LEAST_RATE:
        raise ValueError(f"sample_rate = {rate}: {LEAST_RATE:g} or more")
    link = entry.get("link", "unknown")
    if link not in get_args(Link):
        raise ValueError(f"link = {link!r:.40}")
    groups = _whole(entry.get("groups", 1), "groups")
    concentrated = entry.get("concentrated", False)
    if type(concentrated) is not bool:
        raise ValueError(f"concentrated = {concentrated!r:.40}")
    release = Release(z, rate, drawn, _shares_of(entry), link, groups, concentrated)
    return release, _whole(entry["rounds"], "rounds", least=0 if link in SEEN else 1)


def _shares_of(entry: dict[str, Any]) -> int | Literal["unknown"] | None:
    if "noise_shares" not in entry:
        return "unknown"
    shares = entry["noise_shares"]
    return None if shares is None else _whole(shares, "noise_shares")


def _whole(value: object, key: str, least: int = 1) -> int:
    # Not isinstance: true is an int of Python's too.
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError(f"{key} = {value!r:.40}: a whole number, {least} to {MOST:g}")
    return value


def _number(value: object, key: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{key} = {value!r}: a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{key} is beyond all numbers") from None
