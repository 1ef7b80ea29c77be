"""Keeps the memory that a round has freed for the next one."""

import ctypes
import platform

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_NEVER = 2**31 - 1
_PAD_BYTES = 64 * 2**20


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
