"""Whether the run's own clients may be the adversary of its figure hangs on the SuperLink, too: the
strategy asks it, and the ledger keeps the answer."""

import concurrent.futures
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs
from test_guarded_link import GuardedGrid

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
