"""A run whose ServerApp is started a second time: the same run at Flower, the same folder here.

`blackthorn server` starts one again that died before its run was over. The number by which Flower
knows the run leads to its folder, and the folder says how far it got.
"""

from pathlib import Path

from blackthorn.recording.folder_place import CONFIG, forget_begun
from blackthorn.recording.run_folder import read_metrics
from blackthorn.recording.state_files import read_saved, rounds_begun_by_state
from blackthorn.settings.config import RunConfig
from blackthorn.settings.privacy_checks import claims_anything


class CannotGoOn(RuntimeError):
    """The run was interrupted and left nothing to go on from; the message says why."""


def going_on(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with which the run in `folder` goes on, or begins again.

    Raises CannotGoOn where rounds are done and no state of theirs is there, and under a claim where
    clients may have been asked for one that nothing would count.
    """
    update = {"output_dir": str(folder), "resume": ""}
    if folder.exists() and read_saved(folder) is not None:
        update["resume"] = str(folder)
    elif read_metrics(folder) or _may_have_asked(config, folder):
        raise CannotGoOn(
            f"the run was interrupted and cannot go on: {folder} has no whole state "
            f"(state-every = {config.state_every})"
        )
    else:
        # It had only just begun: these would be taken for another run's.
        forget_begun(folder)
    return config.model_copy(update=update)


def _may_have_asked(config: RunConfig, folder: Path) -> bool:
    """Whether the run may have asked clients for what a claim counts. A run that keeps states has
    one, whole or not, before it does."""
    if not claims_anything(config):
        return False
    if config.state_every == 0:
        return (folder / CONFIG).exists()
    return any(rounds_begun_by_state(folder))
