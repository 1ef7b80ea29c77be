"""Asking Callgrind, from Python, to count the instructions of a call and of nothing else.

    valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file=OUT python ...

Every counted call leaves a file OUT.1, OUT.2, ... that tells its name. Without Valgrind the
requests do nothing.
"""

import ctypes
import mmap
from collections.abc import Callable

# valgrind.h: four rotations of a register by 128 bits in all, and an exchange of another with
# itself, do nothing on a processor and are a request to Valgrind. On x86-64 `rdi` brings the
# address of request and arguments, which goes to `rax`, and the answer is in `rdx`.
_REQUEST = bytes.fromhex(
    "48 89 f8"  # mov rax, rdi
    "31 d2"  # xor edx, edx
    "48 c1 c7 03  48 c1 c7 0d  48 c1 c7 3d  48 c1 c7 33"  # rol rdi, 3; 13; 61; 51
    "48 87 db"  # xchg rbx, rbx
    "48 89 d0"  # mov rax, rdx
    "c3"  # ret
)
RUNNING_ON_VALGRIND = 0x1001
# callgrind.h, from "CT" in the upper two bytes.
_ZERO, _DUMP_AS, _START, _STOP = (0x43540000 + number for number in (1, 3, 4, 5))


class Requests:
    """Client requests to the Valgrind that runs this process, if one does."""

    def __init__(self) -> None:
        everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        # Kept: the function below is in it.
        self._memory = mmap.mmap(-1, mmap.PAGESIZE, prot=everything)
        self._memory.write(_REQUEST)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ask = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(address)

    def send(self, request: int, argument: int = 0) -> int:
        """Valgrind's answer to a request with one argument; 0 without Valgrind."""
        words = (ctypes.c_uint64 * 6)(request, argument)
        return int(self._ask(ctypes.addressof(words)))

    def count(self, name: str, call: Callable[[], object]) -> None:
        """Call it, and have its instructions written down as those of `name`."""
        told = ctypes.create_string_buffer(name.encode())
        self.send(_START)
        self.send(_ZERO)
        call()
        self.send(_DUMP_AS, ctypes.addressof(told))
        self.send(_STOP)
