"""Files that are whole on disk, whatever ends the process or the machine; who may read them, and
which process may write them."""

import fcntl
import io
import os
import stat
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
