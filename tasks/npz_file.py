"""Reading .npz files that somebody else has made."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_DAMAGE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def read_npz(
    path: Path, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """The arrays of these names, the optional ones where they are there. Pickles are refused.

    Raises ValueError with the reason in one line, which does not name the path: for a file that
    does not exist, cannot be read or is damaged, a name that it lacks, a member that is no array.
    """
    try:
        _check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive]
            if missing:
                raise ValueError(f"it has no array {missing[0]}")
            wanted = [*names, *(name for name in optional if name in archive)]
            arrays = {name: archive[name] for name in wanted}
    except _DAMAGE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(reason) from error
    for name, array in arrays.items():
        # A member that is not in NumPy's format comes back as bytes.
        if not isinstance(array, np.ndarray):
            raise ValueError(f"it has no array {name}: its {name} is no array of NumPy's")
    return arrays


def _check_archive(path: Path) -> None:
    """Raises ValueError, which tells a file that is not there from one that is no archive."""
    if not path.exists():
        raise ValueError("it does not exist")
    if not path.is_file():
        raise ValueError("it is a folder or a device")
    try:
        # By its path `is_zipfile` says False of a file that may not be read.
        with path.open("rb") as file:
            archive = zipfile.is_zipfile(file)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    if not archive:
        raise ValueError("it is no zip archive")
