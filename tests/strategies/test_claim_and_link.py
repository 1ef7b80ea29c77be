"""Whether the run's own clients may be the adversary of its figure hangs on the SuperLink, too: the
strategy asks it, and the ledger keeps the answer."""

import concurrent.futures
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from memory_grid import Answer, MemoryGrid, initial_model, quadratic_app, runs
from test_guarded_link import GuardedGrid

from blackthorn.attacks import AttackingGrid
from blackthorn.flower_port.guard import service
from blackthorn.flower_port.guard.checks import Sizes
from blackthorn.flower_port.guard.records import Records
from blackthorn.launch.federation.addresses import LOOPBACK
from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    FullParticipation,
    PrivacyPlan,
    RotatingParticipation,
)
from blackthorn.strategies.ledger import Ledger
from blackthorn.strategies.participation import Participation
from blackthorn.strategies.run_state import RunState
from blackthorn.strategies.secure_plan import SecurePlan

INCLUDED = "all other clients together included"
PLAN = PrivacyPlan(ClipNorm(1.0), noise_multiplier=2.0, num_clients=2, rounds=9, delta=0.01)


@contextmanager
def superlink_in(
    folder: Path, guarded: bool, is_private: bool = True
) -> Iterator[tuple[bool, Any]]:
    """Whether it has the guard, and a channel to it."""
    state: Any = SimpleNamespace(nodes=dict, is_task=lambda _: True)
    guard = service.ForServerApps(state, Records(folder / "guard", 2), Sizes(), lambda: is_private)
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


@pytest.fixture
def plain_superlink(tmp_path: Path) -> Iterator[tuple[bool, Any]]:
    """With the guard, on a port without TLS that others reach."""
    with superlink_in(tmp_path, guarded=True, is_private=False) as link:
        yield link


def test_over_a_link_without_tls_nobody_on_the_way_is_covered(
    plain_superlink: tuple[bool, Any], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.json"
    grid = GuardedGrid({n: runs(quadratic_app(n)) for n in (11, 12)}, plain_superlink[1])
    covered, sentence = told(path, grid)
    assert not covered
    assert INCLUDED not in sentence
    assert (
        "against everybody but the server, whoever is on the way to it, who reads what clients "
        "send, as the link has no TLS, and the run's own clients, who may be there;"
    ) in sentence
    assert {charge["link"] for charge in json.loads(path.read_text())["charges"]} == {"plain"}
    # A later run over a better link, or one without the guard, says no more.
    assert "as the link has no TLS" in told(path)[1]
    assert "as the link has no TLS" in told(path, OpenGrid(grid.nodes))[1]


def test_what_a_guard_does_not_say_of_its_port_is_not_taken_for_private() -> None:
    """Such as one that an earlier version started."""

    class Silent(OpenGrid):
        def guard_report(self) -> dict[str, Any]:
            return {"nodes": {}, "refusals": []}

    strategy = DPFedAvg(PLAN, num_clients=2, statistics="server")
    nodes = {n: runs(quadratic_app(n)) for n in (11, 12)}
    strategy.start(Silent(nodes), initial_model(), num_rounds=1, timeout=60)
    assert [release.link for release, _ in strategy.ledger.charges] == ["plain"]


def test_secure_aggregation_says_whose_keys_it_takes_over_a_link_without_tls() -> None:
    """A reader learns no more than the server does; who changes keys sees through the masks."""
    plan = SecurePlan(ClipNorm(1.0), 2.0, num_clients=5, rounds=9, delta=0.01, survivors=4)
    closed, plain = plan.release(), replace(plan.release(), link="plain")
    said = "as the link has no TLS, whoever changes what is on the way is taken to pass on the"
    assert said in plan.sentence([(closed, 1), (plain, 1)])
    assert said not in plan.sentence([(closed, 2)])


def test_in_one_process_nobody_watches_and_the_figure_covers_the_clients(tmp_path: Path) -> None:
    covered, sentence = told(tmp_path / "ledger.json")
    assert covered
    assert sentence.endswith("no amplification by sampling")
    assert f"{INCLUDED};" in sentence


def test_every_round_is_charged_by_the_link_that_it_went_over() -> None:
    """One strategy, in one process and then where others may watch, by `start` and by hand."""
    nodes = {n: runs(quadratic_app(n)) for n in (11, 12)}
    for by_hand in (False, True):
        strategy = DPFedAvg(PLAN, num_clients=2, statistics="server")
        arrays = initial_model()
        for number, kind in enumerate((MemoryGrid, OpenGrid, MemoryGrid), 1):
            grid = kind(nodes)
            if by_hand:
                asked = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
                strategy.aggregate_train(number, grid.send_and_receive(asked))
            else:
                strategy.start(grid, arrays, num_rounds=1, timeout=60)
        links = [release.link for release, _ in strategy.ledger.charges]
        assert links == ["apart", "open", "apart"]
        assert INCLUDED not in strategy.sentence()


def test_a_link_that_loses_its_guard_is_open_from_then_on() -> None:
    class LosesIt(OpenGrid):
        def guard_report(self) -> dict[str, Any]:
            trained = [one for one in self.sent if one.metadata.message_type == "train"]
            return {"nodes": {}, "is_private": True} if len(trained) <= 2 else {}

    nodes = {n: runs(quadratic_app(n)) for n in (11, 12)}
    strategy = DPFedAvg(PLAN, num_clients=2, statistics="server")
    strategy.start(LosesIt(nodes), initial_model(), num_rounds=2, timeout=60)
    assert [release.link for release, _ in strategy.ledger.charges] == ["apart", "open"]


class PowerCut(Exception):
    """The server dies."""


@pytest.mark.parametrize("participation", [FullParticipation(), RotatingParticipation(2)])
def test_who_was_asked_over_an_open_link_is_not_covered_where_the_round_died_before_its_charge(
    tmp_path: Path, participation: Participation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 1 is closed; round 2 is asked over an open link, lost, and done again over a closed
    one: what its clients sent was seen all the same."""
    path, states = tmp_path / "ledger.json", list[RunState]()
    plan = replace(PLAN, participation=participation)

    def strategy() -> DPFedAvg:
        return DPFedAvg(plan, ledger=path, num_clients=2, statistics="server")

    def node(number: int) -> Answer:
        app = runs(quadratic_app(number))

        def answer(message: Message) -> Message | None:
            # As at a stop, while clients train.
            states.append(running.state())
            return app(message)

        return answer

    def dies(*_: object) -> None:
        raise PowerCut

    nodes = {n: node(n) for n in (11, 12)}
    running = first = strategy()
    first.start(MemoryGrid(nodes), initial_model(), num_rounds=1, timeout=60)
    assert plan.covers_clients(first.ledger.charges)
    state, running = first.state(), strategy()
    states.clear()
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(DPFedAvg, "_charge", dies)
        running.start(OpenGrid(nodes), initial_model(), 3, timeout=60, from_state=state)
    assert states
    before = path.read_bytes()
    for left in (state, states[-1]):
        path.write_bytes(before)
        running = strategy()
        assert running.ledger.rounds == 1
        running.start(MemoryGrid(nodes), initial_model(), 3, timeout=60, from_state=left)
        charges = Ledger(plan, path).charges
        assert sum(count for _, count in charges) == 3
        assert not plan.covers_clients(charges)
        assert INCLUDED not in running.sentence()
        assert running.figure() == plan.figure(3)


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
    assert f"{INCLUDED} (whose SuperLink, if others reach it, has TLS and Blackthorn's guard" in (
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
