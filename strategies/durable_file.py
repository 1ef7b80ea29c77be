"""Files that are whole on disk, whatever ends the process or the machine, and who may read them."""

import os
from pathlib import Path

# Of what is not released: for the owner alone, whatever the umask.
PRIVATE = 0o600
PRIVATE_FOLDER = 0o700
_BY_UMASK = 0o666


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Put `data` in the place of the file `path`; content and name are on disk on return.

    It is written beside it, flushed, then renamed: a crash leaves the old file or the new one,
    and at most a hidden `.NAME.part`, an OSError (which names `path`) the old file alone.
    `private`: from the first byte for its owner alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    # Never the file that a crash left: others may have it open, or may read it.
    part.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(open_file(part, flags, private=private), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError as error:
        # On a full disk it would keep the space that others need.
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def open_file(path: Path, flags: int, *, private: bool) -> int:
    """A descriptor as of os.open; `private`: a new file is readable by its owner alone from the
    first moment, and one that was there before from now on."""
    descriptor = os.open(path, flags, PRIVATE if private else _BY_UMASK)
    if private:
        os.fchmod(descriptor, PRIVATE)
    return descriptor


def part_of(path: Path) -> Path:
    """Where the next content of `path` is written before it takes its place."""
    return path.with_name(f".{path.name}.part")


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(path: Path) -> None:
    """Make the folder `path`, for its owner alone; so is one that was there before."""
    path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    path.chmod(PRIVATE_FOLDER)
