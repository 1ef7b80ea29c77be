"""Whether a run can be resumed, and from where."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from blackthorn.recording.line_log import in_use
from blackthorn.recording.rounds_on_record import rounds_begun
from blackthorn.recording.run_folder import METRICS, read_metrics, read_summary
from blackthorn.recording.state_files import Saved, read_saved
from blackthorn.settings.config import ConfigError, RunConfig, to_mapping
from blackthorn.settings.key_facts import free_on_resume, place_keys
from blackthorn.settings.own_code import OWN_CODE_KEYS, is_same_code
from blackthorn.settings.privacy_checks import has_central_claim, has_local_claim, is_noised

_NOTE = "resume = "

# Where a run is now, not where it was.
_OF_EACH_START = ("resume", "output-dir")


def read_resumed(config: RunConfig) -> Saved:
    """Where the run in the folder `resume` stands; contacts nobody and writes nothing.

    Raises ConfigError, one line, where it cannot go on with this configuration.
    """
    try:
        return _read(config, Path(config.resume).expanduser())
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"resume = {config.resume} is not allowed: {reason}") from None


def note_resumable(error: BaseException, folder: Path) -> None:
    """Let `error` know, for whoever reports it, that the run in the folder can be resumed."""
    with contextlib.suppress(OSError, ValueError):
        saved = read_saved(folder)
        if saved is not None and saved.state.server_round < saved.config["num-server-rounds"]:
            error.add_note(f"{_NOTE}{folder}")


def begins_anew(error: BaseException) -> None:
    """Let `error` no longer say that its run can be resumed: the command has no key for it."""
    if resumable(error):
        error.__notes__ = [note for note in error.__notes__ if not note.startswith(_NOTE)]


def resumable(error: BaseException) -> str:
    """The folder of the run that ended with `error` and can be resumed; empty: it cannot."""
    notes = getattr(error, "__notes__", ())
    return next((note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)), "")


def how_it_goes_on(saved: Saved) -> str:
    """A line for people: after which round, and which states could not be used."""
    said = f"the run goes on after round {saved.state.server_round}"
    if saved.damaged:
        said += f", since {' and '.join(saved.damaged)} cannot be used: damaged"
    return said


def _read(config: RunConfig, folder: Path) -> Saved:
    if not (folder / METRICS).exists():
        raise ConfigError(f"resume = {config.resume} is not allowed: there is no run")
    if config.output_dir and Path(config.output_dir).expanduser().resolve() != folder.resolve():
        raise ConfigError(
            f"output-dir = {config.output_dir} is not allowed with resume = {config.resume}: "
            f"the run goes on in its own folder; set output-dir = {config.resume}"
        )
    if in_use(folder / METRICS):
        raise ConfigError(
            f"resume = {config.resume} is not allowed: the folder is in use by a run that has "
            "not ended"
        )
    summary = read_summary(folder)
    if summary is not None and summary["status"] == "completed":
        raise ConfigError(
            f"resume = {config.resume} is not allowed: the run is completed "
            f"({summary['rounds_completed']} rounds)"
        )
    saved = read_saved(folder)
    if saved is None:
        raise ConfigError(
            f"resume = {config.resume} is not allowed: there is no whole state to go on from "
            "(state-every = 0, or all are damaged)"
        )
    _check_same(config, saved)
    if has_local_claim(config):
        _refuse_copy(config, folder, saved)
    values = {**saved.state.values, "rounds_begun": rounds_begun(folder, saved)}
    own = values.get("own", {})
    if has_central_claim(config) and "ledger" in own:
        # An earlier version did not say it: by the same configuration its rounds were charged.
        values["own"] = {**own, "ledger": {"charged": True, **own["ledger"]}}
    return replace(saved, state=replace(saved.state, values=values, counted=True))


def _refuse_copy(config: RunConfig, folder: Path, saved: Saved) -> None:
    """What clients told in the rounds of a run counts once: of two copies that go on, each would
    say less than was told.

    A folder with other rounds up to the state is another run's. Where the state is from before the
    first round on record, nothing tells: what goes on from there is done anew.
    """
    original = Path(saved.place)
    if not saved.place or not (original / METRICS).exists() or original.samefile(folder):
        return
    there, own = read_metrics(original), read_metrics(folder)
    both = min(len(there), len([line for line in own if line["round"] <= saved.state.server_round]))
    if there[:both] == own[:both]:
        raise ConfigError(
            f"resume = {config.resume} is not allowed under a claim of what clients tell: it is a "
            f"copy of {original}, which is still there; resume that one, or remove it if it has "
            "not gone on since"
        )


def moved_folder(saved: Saved | None, folder: Path) -> str | None:
    """What to tell where a run goes on in another folder than it was in, else None: whether that is
    a copy, and what it was copied from goes on elsewhere, nobody can know."""
    if saved is None or saved.place in ("", str(folder.resolve())):
        return None
    return (
        f"the run was elsewhere before ({saved.place}); if it goes on there as well, or in another "
        "copy, its figures do not count what clients tell that"
    )


def with_its_places(config: RunConfig, saved: Saved) -> RunConfig:
    """`config` with places that it does not name where the run had them: what a run leaves to be
    released does not say them, and is a recipe to resume it all the same."""
    kept = {
        key.replace("-", "_"): saved.config.get(key, "")
        for key, value in to_mapping(config).items()
        if key in place_keys() and key not in _OF_EACH_START and not value
    }
    return config.model_copy(update=kept)


def _check_same(config: RunConfig, saved: Saved) -> None:
    now = to_mapping(with_its_places(config, saved))
    before = {**to_mapping(RunConfig()), **saved.config}
    folder = Path(config.resume).expanduser()
    differing = [
        f"{key} = {_shown(value)} (was {_shown(before[key])})"
        for key, value in now.items()
        if key not in (*free_on_resume(), *OWN_CODE_KEYS) and value != before[key]
    ]
    differing += [
        f"{key} = {now[key]} (was {before[key]}, with the code of which the folder has a copy)"
        for key in OWN_CODE_KEYS
        if not is_same_code(key, str(now[key]), str(before[key]), folder)
    ]
    rounds = before["num-server-rounds"]
    if config.num_server_rounds < rounds:
        differing.append(f"num-server-rounds = {config.num_server_rounds} (was {rounds}, no fewer)")
    fixed = _rounds_are_fixed_by(config)
    if config.num_server_rounds > rounds and fixed:
        differing.append(
            f"num-server-rounds = {config.num_server_rounds} (was {rounds}, which {fixed} fixed)"
        )
    if differing:
        raise ConfigError(
            f"resume = {config.resume} is not allowed with another configuration: "
            f"{', '.join(differing)}"
        )


def _rounds_are_fixed_by(config: RunConfig) -> str:
    """The key for whose sake a run may not get more rounds; empty: it may."""
    if config.output_iterate not in ("last", "best"):
        return f"output-iterate = {config.output_iterate}"
    return "epsilon" if is_noised(config) and config.epsilon > 0 else ""


def _shown(value: Any) -> str:
    return f'"{value}"' if value == "" else str(value)
