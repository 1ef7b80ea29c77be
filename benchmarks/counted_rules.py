"""What `instruction_counts.py` runs under Valgrind: each aggregation rule once while it counts.

    valgrind --tool=callgrind --instr-atstart=no python -m benchmarks.counted_rules UPDATES.npy

Callgrind counts from one client request to another and then writes a file that tells the rule's
name. Without Valgrind the requests do nothing.
"""

import ctypes
import mmap
import sys

import numpy as np
import torch

from benchmarks.aggregation_workload import our_rules

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
        return int(self._ask(ctypes.addressof((ctypes.c_uint64 * 6)(request, argument))))


def main() -> None:
    """Call every rule on the updates [K, d] of a file: first uncounted, then counted."""
    torch.set_num_threads(1)
    updates = np.load(sys.argv[1])
    requests = Requests()
    for name, call in our_rules(updates, len(updates) // 8).items():
        # The first call compiles kernels and loads libraries.
        call()
        told = ctypes.create_string_buffer(name.encode())
        requests.send(_START)
        requests.send(_ZERO)
        call()
        requests.send(_DUMP_AS, ctypes.addressof(told))
        requests.send(_STOP)


if __name__ == "__main__":
    main()
