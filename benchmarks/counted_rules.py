"""What `instruction_counts.py` runs under Valgrind: each aggregation rule once while it counts.

Its argument is a file of NumPy's with the updates.
"""

import sys

import numpy as np
import torch

from benchmarks.aggregation_workload import our_rules
from benchmarks.valgrind_requests import Requests


def main() -> None:
    """Call every rule on the updates [K, d] of a file: first uncounted, then counted."""
    torch.set_num_threads(1)
    updates = np.load(sys.argv[1])
    requests = Requests()
    for name, call in our_rules(updates, len(updates) // 8).items():
        # The first call compiles kernels and loads libraries.
        call()
        requests.count(name, call)


if __name__ == "__main__":
    main()
