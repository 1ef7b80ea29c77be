"""Whether the run's own clients may be the adversary of its figure hangs on the SuperLink, too: the
strategy asks it, and the ledger keeps the answer."""

import concurrent.futures
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import Message
from flwr.serverapp import Grid
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs
from test_guarded_link import GuardedGrid

from blackthorn.attacks import AttackingGrid
from blackthorn.flower_port.guard import service
from blackthorn.flower_port.guard.checks import Sizes
from blackthorn.flower_port.guard.records import Records
from blackthorn.launch.federation.addresses import LOOPBACK
from blackthorn.strategies import ClipNorm, DPFedAvg, PrivacyPlan
from blackthorn.strategies.ledger import Ledger

INCLUDED = "all other clients together included"
PLAN = PrivacyPlan(ClipNorm(1.0), noise_multiplier=2.0, num_clients=2, rounds=9, delta=0.01)


@contextmanager
def superlink_in(folder: Path, guarded: bool) -> Iterator[tuple[bool, Any]]:
    """Whether it has the guard, and a channel to it."""
    state: Any = SimpleNamespace(nodes=dict, is_task=lambda _: True)
    guard = service.ForServerApps(state, Records(folder / "guard", offences=2), Sizes())
    pool = concurrent.futures.ThreadPoolExecutor(2)
    server = grpc.server(pool, interceptors=[guard] if guarded else [])
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    try:
        with grpc.insecure_channel(f"{LOOPBACK}:{port}") as channel:
            yield guarded, channel
    finally:
        server.stop(0).wait(10)


@pytest.fixture(params=["guarded", "open"])
def superlink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[bool, Any]]:
    """Of either kind."""
    with superlink_in(tmp_path, request.param == "guarded") as link:
        yield link


def told(ledger: Path, grid: MemoryGrid | None = None) -> tuple[bool, str]:
    """Two rounds on the ledger, and what is then claimed: whether clients are covered, in words."""
    nodes = {n: runs(quadratic_app(n)) for n in (11, 12)}
    strategy = DPFedAvg(PLAN, ledger=ledger, num_clients=2, statistics="server")
    strategy.start(grid or MemoryGrid(nodes), initial_model(), num_rounds=2, timeout=60)
    charges = Ledger(PLAN, ledger).charges
    assert charges == strategy.ledger.charges
    return PLAN.covers_clients(charges), PLAN.sentence(charges)


def test_clients_of_a_superlink_without_the_guard_are_not_covered(
    superlink: tuple[bool, Any], tmp_path: Path
) -> None:
    guarded, channel = superlink
    grid = GuardedGrid({n: runs(quadratic_app(n)) for n in (11, 12)}, channel)
    covered, sentence = told(tmp_path / "ledger.json", grid)
    assert covered == guarded
    assert (INCLUDED in sentence) == guarded
    said = "own clients, who know what others sent, which a SuperLink without Blackthorn's guard"
    assert (said in sentence) != guarded
    # A later run, which nobody could watch, is covered by the same figure no more than the first.
    assert told(tmp_path / "ledger.json")[0] == guarded


def test_in_one_process_nobody_watches_and_the_figure_covers_the_clients(tmp_path: Path) -> None:
    covered, sentence = told(tmp_path / "ledger.json")
    assert covered
    assert sentence.endswith("no amplification by sampling")
    assert f"{INCLUDED};" in sentence


def attacking(grid: Any) -> AttackingGrid:
    return AttackingGrid(grid, "sign-flip", lambda _: set(), seed=0)


class PassesOn(Grid):
    """Somebody's own around another, with the methods that Flower asks for."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        made: Message = self._grid.create_message(*arguments, **options)
        return made

    def get_node_ids(self) -> list[int]:
        return list(self._grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return list(self._grid.push_messages(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return list(self._grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return list(self._grid.send_and_receive(messages, timeout=timeout))


class OpenGrid(MemoryGrid):
    """As if others reached it, too."""

    is_closed = False


@pytest.mark.parametrize(
    ("around", "covered"),
    [
        (lambda grid: grid, True),
        # What is behind it is not known.
        (PassesOn, False),
        (lambda grid: attacking(PassesOn(grid)), False),
        (lambda grid: attacking(OpenGrid(grid.nodes)), False),
        (attacking, True),
    ],
)
def test_a_grid_around_a_grid_is_no_more_closed_than_what_it_passes_messages_to(
    tmp_path: Path, around: Callable[[MemoryGrid], Any], covered: bool
) -> None:
    grid = MemoryGrid({n: runs(quadratic_app(n)) for n in (11, 12)})
    is_covered, sentence = told(tmp_path / "ledger.json", around(grid))
    assert is_covered == covered
    assert (INCLUDED in sentence) == covered


def test_a_plan_alone_says_what_it_assumes_of_the_superlink() -> None:
    assert f"{INCLUDED} (whose SuperLink, if others reach it, has Blackthorn's guard" in (
        PLAN.sentence()
    )


def test_a_ledger_that_does_not_say_what_clients_saw_covers_none(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    told(path)
    content = json.loads(path.read_text())
    for charge in content["charges"]:
        assert charge.pop("link") == "apart"
    path.write_text(json.dumps(content))
    covered, sentence = told(path)
    assert not covered
    assert "did not note whether the SuperLink has Blackthorn's guard" in sentence
    content["charges"][0]["link"] = "closed"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is damaged: ValueError link = 'closed'"):
        Ledger(PLAN, path)
