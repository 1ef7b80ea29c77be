"""How the memory of a deployment's processes grows, from /proc."""

from dataclasses import dataclass, field
from pathlib import Path

from blackthorn.launch.federation.process_environment import CLUSTER_VARIABLE, marked_processes

# Linux keeps 15 characters of a process's name.
_NAME_LENGTH = 15
_LONG_LIFE = 50


@dataclass
class _History:
    """Resident sizes (bytes) in the order in which they were seen, and the largest ever."""

    name: str
    sizes: list[int] = field(default_factory=list)
    peak: int = 0


class MemoryWatch:
    """Remembers the resident sizes of a cluster's processes."""

    def __init__(self) -> None:
        self._processes: dict[int, _History] = {}

    def look(self, cluster_id: str) -> None:
        """Measure all processes of the cluster once."""
        for pid in marked_processes({f"{CLUSTER_VARIABLE}={cluster_id}".encode()}):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if "VmRSS" not in fields:  # a zombie
                continue
            name = fields["Name"].strip()
            process = self._processes.setdefault(pid, _History(name))
            if process.name != name:  # it was forked, and has become another program since
                process = self._processes[pid] = _History(name)
            process.sizes.append(1024 * int(fields["VmRSS"].split()[0]))
            process.peak = 1024 * int(fields["VmHWM"].split()[0])

    def growth(self, program: str) -> int:
        """How far the peak of a process of this program lies above its first size; 0 for none."""
        return max((p.peak - p.sizes[0] for p in self._of(program)), default=0)

    def late_growth(self, program: str) -> int:
        """How far a process's largest size in its last quarter lies above that of its second."""
        grown = [0]
        for process in self._of(program):
            quarter = len(process.sizes) // 4
            if quarter:
                second, last = process.sizes[quarter : 2 * quarter], process.sizes[-quarter:]
                grown.append(max(last) - max(second))
        return max(grown)

    def describe(self) -> str:
        """A line a process that lived long: its first, median, last and largest size in MiB."""
        lines = []
        for pid, process in self._processes.items():
            sizes = process.sizes
            shown = (sizes[0], sorted(sizes)[len(sizes) // 2], sizes[-1], process.peak)
            if len(sizes) >= _LONG_LIFE:
                lines.append(f"{process.name} {pid}: {[size >> 20 for size in shown]}")
        return "\n".join(lines)

    def _of(self, program: str) -> list[_History]:
        return [p for p in self._processes.values() if p.name == program[:_NAME_LENGTH]]
