"""A file that one process at a time may write, and that is whole whenever that process ends."""

import fcntl
import os
import stat
from pathlib import Path

from .durable_file import open_file, part_of, sync_folder


class FileInUse(RuntimeError):
    """Another process has the file, or has put another in its place."""


class LockedFile:
    """The file `path`, which may not be there yet, for this process alone until `close`.

    The lock is on the file itself: one on a file beside it would be gone with that file. Whoever
    replaces the content locks the new file before it takes the old one's name, so that the name
    never stands for a file that nobody holds. Raises FileInUse where somebody else has it,
    OSError where it cannot be opened or locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None
        try:
            # For writing: over NFS nothing else can be locked exclusively.
            descriptor = open_file(path, os.O_RDWR | os.O_NOFOLLOW, private=True)
        except FileNotFoundError:
            return
        self._held = _locked(descriptor, path)

    def replace(self, data: bytes) -> None:
        """Put `data` in the file's place, readable by its owner alone; on disk on return.

        A file that was deleted meanwhile is written again. Raises FileInUse where it is another.
        """
        part = part_of(self.path)
        # One that was left by a crash is used again: whoever writes now has it locked.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = _locked(open_file(part, flags, private=True), part)
        try:
            self._check_place()
            os.ftruncate(descriptor, 0)
            with os.fdopen(descriptor, "wb", closefd=False) as stream:
                stream.write(data)
            os.fsync(descriptor)
            part.replace(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._held = descriptor
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Let others have it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _check_place(self) -> None:
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            return
        if self._held is None or not os.path.samestat(os.fstat(self._held), there):
            raise FileInUse


def _locked(descriptor: int, path: Path) -> int:
    """`descriptor`, locked, if it is what `path` stands for; else it is closed and this raises."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _stands_for(path, descriptor):
            raise FileInUse
    except BlockingIOError:
        os.close(descriptor)
        raise FileInUse from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _stands_for(path: Path, descriptor: int) -> bool:
    """Somebody may have put another file there between the opening and the locking of this one."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(there.st_mode) and os.path.samestat(os.fstat(descriptor), there)
