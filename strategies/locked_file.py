"""A file that one process at a time may write, and that is whole whenever that process ends."""

import fcntl
import io
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
        # An object, not a descriptor: an interrupt may come between any two steps, and this is
        # closed once however often it is asked to, and also where nobody is left to ask.
        self._held: io.FileIO | None = None
        try:
            # For writing: over NFS nothing else can be locked exclusively.
            self._held = _locked(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return

    def replace(self, data: bytes) -> None:
        """Put `data` in the file's place, readable by its owner alone; on disk on return.

        A file that was deleted meanwhile is written again. Raises FileInUse where it is another.
        """
        part = part_of(self.path)
        # One that was left by a crash is used again: whoever writes now has it locked.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = _locked(part, flags)
        try:
            self._check_place()
            file.truncate(0)
            with os.fdopen(file.fileno(), "wb", closefd=False) as stream:
                stream.write(data)
            os.fsync(file.fileno())
            part.replace(self.path)
        except BaseException:
            file.close()
            raise
        old, self._held = self._held, file
        if old is not None:
            old.close()
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Let others have it."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _check_place(self) -> None:
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            return
        if self._held is None or not os.path.samestat(os.fstat(self._held.fileno()), there):
            raise FileInUse


def _locked(path: Path, flags: int) -> io.FileIO:
    """The file, opened and locked, if it is what `path` stands for then; else this raises."""
    file = io.FileIO(open_file(path, flags, private=True), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _stands_for(path, file.fileno()):
            raise FileInUse
    except BlockingIOError:
        file.close()
        raise FileInUse from None
    except BaseException:
        file.close()
        raise
    return file


def _stands_for(path: Path, descriptor: int) -> bool:
    """Somebody may have put another file there between the opening and the locking of this one."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(there.st_mode) and os.path.samestat(os.fstat(descriptor), there)
