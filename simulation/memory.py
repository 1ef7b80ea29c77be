"""What a process does once so that thousands of messages a round cost little memory work."""

import atexit
import ctypes
import gc
import platform
from functools import cache

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_NEVER = 2**31 - 1
_PAD_BYTES = 64 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Tell the C library never to give freed memory back to the system, in this whole process.

    By default glibc maps every large block afresh and returns it when it is freed, so that the
    system has to clear all its pages again at the next use: for the matrices [K, d] of a round
    this takes many times the arithmetic. The process then keeps the largest amount it ever used.

    Returns whether that was possible: False with another C library, where nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted)


@cache
def set_imports_aside() -> None:
    """Exempt what exists now, above all the imported libraries, from garbage collection.

    A round makes so many messages that the collector looks through everything a few times: the
    half million objects of PyTorch took longer than the round's arithmetic. Once a process: what
    is garbage at this moment stays.
    """
    gc.freeze()
    # Libraries that count their objects at the end expect them to be collected then.
    atexit.register(gc.unfreeze)
