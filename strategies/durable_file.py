"""Files that are whole on disk, whatever ends the process or the machine."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of the file `path`; content and name are on disk on return.

    It is written beside it, flushed, then renamed: a crash leaves the old file or the new one,
    and at most a hidden `.NAME.part`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
