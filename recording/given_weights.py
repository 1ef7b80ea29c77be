"""Weights that a run under a claim is given to start from, by a file or by code of one's own: its
figure counts nothing of what they tell, so that the claim names them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from blackthorn.recording.rounds_on_record import (
    lines_on_record,
    mark_on_record,
    rounds_of_run_on_record,
)
from blackthorn.recording.run_folder import CHECKPOINTS, CONFIG
from blackthorn.recording.run_ledger import ledger_path
from blackthorn.settings.config import ConfigError, RunConfig, to_mapping
from blackthorn.settings.own_code import OWN_CODE_KEYS, is_own_code
from blackthorn.settings.privacy_checks import (
    OR_NO_CLAIM,
    claims_anything,
    claims_sample_privacy,
    has_central_claim,
)
from blackthorn.strategies import Ledger, PrivacyPlan

# Fields of a round's line, and of the summary's privacy entries: the digest of a file of weights,
# and of the model with which code of one's own lets the run begin, loaded or not.
FIELD, OF_CODE = "initial_model", "first_model"
UNKNOWN = "unknown"
# The field of a privacy entry that names keys of own code.
CODE_FIELD = "own_code"


def check_given_weights(
    config: RunConfig, plan: PrivacyPlan | None, model: nn.Module, folder: Path, *, resumed: bool
) -> dict[str, str]:
    """Digests of the weights in `initial-model` and of the `model` that code of one's own lets the
    run begin with, by their fields; none of what is not there, or where nothing is claimed that
    they could break. Of a run that is resumed the second is of what it began with.

    Raises ConfigError, one line, where they lie in the folder of a run that this run's ledger does
    not count, and where a run that is resumed began with others.
    """
    given = {}
    claims = has_central_claim(config) or claims_sample_privacy(config)
    if config.initial_model and claims:
        given[FIELD] = _digest_of_file(config, plan, folder, resumed=resumed)
    if own_code_of(config) and claims_anything(config):
        before = given_on_record(folder) if resumed else {}
        given[OF_CODE] = before.get(OF_CODE) or _digest_of_model(model)
    return given


def _digest_of_model(model: nn.Module) -> str:
    """Of names, dtypes, shapes and bytes, in the state's order."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {[*value.shape]}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()}"


def _digest_of_file(
    config: RunConfig, plan: PrivacyPlan | None, folder: Path, *, resumed: bool
) -> str:
    path = Path(config.initial_model).expanduser()
    source = _folder_of_run(path)
    if source is not None:
        why = _not_counted(config, plan, folder, source)
        if why:
            raise ConfigError(
                f"initial-model = {config.initial_model} breaks the claim: it lies in the folder "
                f"of a run, {source}, and {why}, so that no figure counts what it tells; set the "
                "ledger that run has charged, copy the weights elsewhere if they are public, "
                f"{OR_NO_CLAIM}"
            )
    with path.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    began_with = given_on_record(folder).get(FIELD) if resumed else None
    if began_with not in (None, digest):
        raise ConfigError(
            f"initial-model = {config.initial_model} is not allowed: the run began with other "
            f"weights, {began_with}; put them back"
        )
    return digest


def what_is_given(given: Mapping[str, str]) -> str | None:
    """What to tell before a run starts from given weights, else None."""
    if FIELD not in given:
        return None
    return (
        f"initial-model: the figure takes the given weights ({given[FIELD]}) to be public; what "
        "they tell of the clients is not counted"
    )


def own_code_of(config: RunConfig) -> list[str]:
    """The keys by which code of one's own has a hand in what is released, and may load weights, for
    example: what it brings along no figure counts. (`data` gives the clients' own, which one does.)
    """
    settings = to_mapping(config)
    return [key for key in OWN_CODE_KEYS if key != "data" and is_own_code(str(settings[key]))]


def of_own_code(config: RunConfig) -> str:
    """How a claim ends that takes what own code loads to be public; else empty."""
    keys = ", ".join(own_code_of(config))
    return f"; what code of one's own loads ({keys}) is taken to be public" if keys else ""


def what_own_code_loads(config: RunConfig) -> str | None:
    """What to tell before a run whose own code no figure has looked into, else None."""
    keys = own_code_of(config)
    if not keys or not claims_anything(config):
        return None
    return (
        f"{', '.join(keys)}: the figure takes what code of one's own loads, weights for example, "
        "to be public; what that tells of the clients is not counted"
    )


def given_on_record(folder: Path) -> dict[str, str]:
    """What the run in `folder` began with, by its lines."""
    first = next((line for line in lines_on_record(folder) if {FIELD, OF_CODE} & line.keys()), {})
    return {name: str(first[name]) for name in (FIELD, OF_CODE) if name in first}


def _folder_of_run(path: Path) -> Path | None:
    for folder in path.resolve().parents:
        if (folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir():
            return folder
    return None


def _not_counted(
    config: RunConfig, plan: PrivacyPlan | None, folder: Path, source: Path
) -> str | None:
    """Why the ledger of the run does not hold what the run in `source` released; None: it does."""
    path = ledger_path(config, folder)
    if plan is None or path is None:
        return "this run charges no ledger"
    try:
        mark = mark_on_record(source)
        if mark is None:
            return "that run has charged no ledger"
        Ledger(plan, path).require(mark, rounds_of_run_on_record(source, mark))
    except ValueError as error:
        return f"this run's ledger {path} does not count it ({error})"
    return None
