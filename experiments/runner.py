"""Measures the cells of experiments, several at a time, and keeps each value at once."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from typing import Any

import torch

from blackthorn.experiments.store import Store
from blackthorn.experiments.study import Cell, Context, Experiment, Label, Scale, Value
from blackthorn.simulation.clients_alone import ends_with_its_parent


@dataclass
class Progress:
    """How far a measurement is: cells, and their guessed seconds."""

    cells: int
    cost: float
    done: int = 0
    done_cost: float = 0.0
    stored: int = 0
    latest: str = ""

    def tell(self, experiment: str, cell: Cell) -> None:
        """A cell has ended."""
        self.done += 1
        self.done_cost += cell.cost
        self.latest = " ".join([experiment, *map(str, cell.label)])


Watch = Callable[[Progress], None]


@dataclass
class Plan:
    """An experiment's cells at a scale, and the values there are so far, by label."""

    experiment: Experiment
    cells: Sequence[Cell]
    keys: dict[Label, str]
    numbers: dict[Label, Value] = field(default_factory=dict)

    def take(self, key: str, value: Value) -> None:
        """Note the value of the cell with this key, if there is one."""
        for label, own in self.keys.items():
            if own == key:
                self.numbers[label] = value

    @property
    def complete(self) -> bool:
        """Whether every cell has a value."""
        return len(self.numbers) == len(self.cells)


def plan(experiment: Experiment, scale: Scale, store: Store) -> Plan:
    """The experiment's cells, with the values that the store already has."""
    cells = experiment.cells(scale)
    keys: dict[Label, str] = {}
    for cell in cells:
        if cell.label in keys:
            raise AssertionError(f"{experiment.name}: two cells are called {cell.label}")
        keys[cell.label] = cell.key(keys[cell.after] if cell.after is not None else "")
    found = Plan(experiment, cells, keys)
    for cell in cells:
        value = store.get(keys[cell.label])
        if value is not None:
            found.numbers[cell.label] = value
    return found


def measure(
    plans: Sequence[Plan], store: Store, data_dir: str, processes: int, watch: Watch
) -> None:
    """Fill in what the plans lack. `watch` is told at the start and after every cell.

    With `processes` 1 the cells are measured in this process, one after the other. What is
    interrupted has kept every value that was finished.
    """
    # Experiments may share cells: each is measured once.
    first: dict[str, tuple[Plan, Cell]] = {}
    for own in plans:
        for cell in own.cells:
            if cell.label not in own.numbers:
                first.setdefault(own.keys[cell.label], (own, cell))
    open_cells = list(first.values())
    keys = {key for own in plans for key in own.keys.values()}
    progress = Progress(len(keys), sum(cell.cost for _, cell in open_cells))
    progress.done = progress.stored = progress.cells - len(open_cells)
    watch(progress)
    if not open_cells:
        return
    with executor(processes) as pool:
        for own, cell, (value, seconds) in _values(open_cells, pool, processes, data_dir):
            key = own.keys[cell.label]
            store.put(key, value, seconds, own.experiment.name, cell.label)
            for other in plans:
                other.take(key, value)
            progress.tell(own.experiment.name, cell)
            watch(progress)


def _values(
    waiting: list[tuple[Plan, Cell]], pool: Executor, processes: int, data_dir: str
) -> Iterator[tuple[Plan, Cell, tuple[Value, float]]]:
    """Every cell's value, in the order in which they end; the costly ones begin first."""
    waiting = sorted(waiting, key=lambda pair: -_chain_cost(*pair))
    running: dict[Future[tuple[Value, float]], tuple[Plan, Cell]] = {}
    while waiting or running:
        ready = [pair for pair in waiting if _is_ready(*pair)]
        for own, cell in ready[: processes - len(running)]:
            before = None if cell.after is None else own.numbers[cell.after]
            waiting.remove((own, cell))
            future = pool.submit(_timed, cell, Context(data_dir, before))
            running[future] = (own, cell)
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            own, cell = running.pop(future)
            yield own, cell, future.result()


def _timed(cell: Cell, context: Context) -> tuple[Value, float]:
    """The cell's value, and the seconds that it took."""
    begun = time.perf_counter()
    value = cell.work(cell.settings, context)
    return value, time.perf_counter() - begun


def _is_ready(own: Plan, cell: Cell) -> bool:
    """Whether the cell that this one comes after has its value."""
    return cell.after is None or cell.after in own.numbers


def _chain_cost(own: Plan, cell: Cell) -> float:
    """The cost of a cell and of those that wait for it."""
    return cell.cost + sum(other.cost for other in own.cells if other.after == cell.label)


class _Here(Executor):
    """Does the work at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def in_this_process(processes: int = 1) -> Iterator[Executor]:
    """An executor without processes of its own."""
    del processes
    yield _Here()


@contextmanager
def executor(processes: int) -> Iterator[Executor]:
    """An executor with so many processes, which end with this one however it ends; with one, it
    does the work in this process. What is under way when the block is left by an exception is lost.
    """
    if processes == 1:
        with in_this_process() as here:
            yield here
        return
    # Spawned, not forked: a fork of a process with threads may never wake.
    others = set(active_children())
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        # What is under way is lost in any case: nobody waits for it.
        for worker in set(active_children()) - others:
            worker.terminate()
        raise
    pool.shutdown()


def _prepare_worker() -> None:
    ends_with_its_parent()
    torch.set_num_threads(1)
    # What is loaded by now stays: the collector need not look at it again and again.
    gc.freeze()
    # That some of the runs diverge is what is to be shown.
    logging.getLogger("blackthorn").setLevel(logging.ERROR)
