"""Shakespeare in LEAF's JSON layout: every role of every play is a client, and the next character
after 80 characters is to be told (Caldas et al., LEAF, 2018)."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.tasks.char_lstm import build_char_lstm
from blackthorn.tasks.datasets import DATA_DIR_VARIABLE, DataUnavailable, Examples
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.task import leave_alone

LENGTH = 80
# The order that LEAF numbers the characters in, so that models can be exchanged with it.
VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
# LEAF looks a character up by a search that answers -1 for an unknown one: the last.
_UNKNOWN = len(VOCABULARY) - 1
_NUMBERS = np.full(128, _UNKNOWN, dtype=np.uint8)
_NUMBERS[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))


def load(config: ProblemKeys) -> LabelledTask:
    """The task, read from the folders DATA_DIR/shakespeare/train and .../test.

    Raises DataUnavailable where the files are absent or damaged.
    """
    leave_alone(config, input_shape="", num_classes=0)
    folder = config.data_dir or os.environ.get(DATA_DIR_VARIABLE, "")
    if not folder:
        raise _unavailable("DATA_DIR", "no data folder is named")
    return _load(str(Path(folder).expanduser().absolute()))


@cache
def _load(folder: str) -> LabelledTask:
    root = Path(folder) / "shakespeare"
    try:
        train, users = _read_split(root / "train")
        test, _ = _read_split(root / "test")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise _unavailable(folder, first_line) from error
    return LabelledTask(
        "shakespeare",
        train,
        test,
        (LENGTH,),
        len(VOCABULARY),
        "char-lstm",
        natural=users,
        builder=build_char_lstm,
        evaluation_batch=256,
        # LEAF splits the lines of every role.
        evaluation_data="same-people",
    )


def _read_split(folder: Path) -> tuple[Examples, list[np.ndarray]]:
    """All examples of train or test by ascending user, and the indices of each user's."""
    texts: dict[str, list[np.ndarray]] = {}
    nexts: dict[str, list[np.ndarray]] = {}
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"there is no .json file in {folder}")
    for file in files:
        for user, data in _read_file(file):
            x, y = _strings(file, user, data["x"], LENGTH), _strings(file, user, data["y"], 1)
            if len(x) != len(y):
                raise ValueError(f"{file.name}: user {user!r} has {len(x)} x and {len(y)} y")
            texts.setdefault(user, []).append(x)
            nexts.setdefault(user, []).append(y[:, 0])
    users = sorted(texts)
    all_x = torch.from_numpy(np.concatenate([part for user in users for part in texts[user]]))
    all_y = torch.from_numpy(np.concatenate([part for user in users for part in nexts[user]]))
    counts = [sum(map(len, nexts[user])) for user in users]
    ends = np.cumsum(counts)
    indices = [np.arange(end - n, end) for n, end in zip(counts, ends, strict=True) if n > 0]
    if not indices:
        raise ValueError(f"there are 0 examples in {folder}")
    return Examples(all_x, all_y.to(torch.int64)), indices


def _read_file(file: Path) -> list[tuple[str, dict[str, Any]]]:
    content = json.loads(file.read_text(encoding="utf-8"))
    return [(user, content["user_data"][user]) for user in content["users"]]


def _strings(file: Path, user: str, strings: list[str], length: int) -> np.ndarray:
    """Character numbers uint8 [n, length] of n strings, which must all be that long."""
    for string in strings:
        if len(string) != length:
            raise ValueError(
                f"{file.name}: user {user!r} has a string of {len(string)} characters where "
                f"{length} belong"
            )
    codes = np.frombuffer("".join(strings).encode("utf-32-le"), dtype=np.uint32)
    known = codes < len(_NUMBERS)
    numbers = np.where(known, _NUMBERS[np.where(known, codes, 0)], np.uint8(_UNKNOWN))
    return numbers.reshape(-1, length)


def _unavailable(folder: str, reason: str) -> DataUnavailable:
    return DataUnavailable(
        f"data set 'shakespeare' is not to be had from {folder!r} ({reason}): in LEAF's "
        "data/shakespeare run  ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample -tf 0.8 , put its "
        "folders data/train and data/test into DATA_DIR/shakespeare, and name DATA_DIR by the key "
        f"data-dir or the environment variable {DATA_DIR_VARIABLE}"
    )
