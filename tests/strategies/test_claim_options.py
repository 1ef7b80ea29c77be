"""Every option of a private strategy under a claim: in the table, and as the table says."""

import dataclasses
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs, vector_of

from blackthorn import strategies
from blackthorn.client_app.messages import read_round
from blackthorn.strategies import (
    ClipNorm,
    FederatedStrategy,
    FullParticipation,
    LocalRate,
    NotEnoughClients,
    OutputIterate,
    PrivacyPlan,
    RageFilter,
    ServerStep,
    StrategyOptions,
)
from blackthorn.strategies.aggregators import CorruptionBound
from blackthorn.strategies.claim_options import (
    OPTIONS,
    PRIVATE_OPTIONS,
    START_ARGUMENTS,
    Row,
    check_options,
)
from blackthorn.strategies.private_averaging import PrivateAveraging

CLIENTS = 4
# These models have BatchNorm's statistics, which under a claim are not averaged.
DPFedAvg = partial(strategies.DPFedAvg, statistics="server")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is zero: a plan with so little noise would be refused."""

    def nothing(shape: tuple[int, ...], *_: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    monkeypatch.setattr("blackthorn.strategies.private_averaging.gaussian_noise", nothing)


def plan(**options: Any) -> PrivacyPlan:
    """Of a noise that `quiet` leaves out, so that the sum and its denominator show."""
    return PrivacyPlan(
        **{
            "clip_norm": ClipNorm(100.0),
            "noise_multiplier": 1.0,
            "num_clients": CLIENTS,
            "rounds": 3,
            "participation": FullParticipation(),
            **options,
        }
    )


def grid(clients: int = CLIENTS) -> MemoryGrid:
    return MemoryGrid(
        {
            10 + i: runs(quadratic_app(i, 10, {"client-id": i, "num-examples": 10}))
            for i in range(clients)
        }
    )


# The table is whole.


def test_every_option_has_a_row_and_a_reason() -> None:
    assert OPTIONS.keys() == StrategyOptions.__annotations__.keys()
    taken = inspect.signature(FederatedStrategy.__init__).parameters.keys() - {"self"}
    assert OPTIONS.keys() == taken
    own = inspect.signature(PrivateAveraging.__init__).parameters.keys() - {"self", "options"}
    assert PRIVATE_OPTIONS.keys() == own
    start = inspect.signature(FederatedStrategy.start).parameters.keys() - {"self"}
    assert START_ARGUMENTS.keys() == start
    for row in [*OPTIONS.values(), *PRIVATE_OPTIONS.values(), *START_ARGUMENTS.values()]:
        assert len(row.reason) > 10


def test_no_private_strategy_takes_more() -> None:
    kinds = [PrivateAveraging]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("blackthorn."):
            assert named_parameters(kind) <= named_parameters(PrivateAveraging)


def named_parameters(kind: type) -> set[str]:
    """What a class takes by itself; what `**options` takes goes to the class that it stands on."""
    parameters = inspect.signature(kind).parameters.values()
    return {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}


def test_an_option_without_a_row_is_refused_under_a_claim() -> None:
    with pytest.raises(ValueError, match="novelty is not known to be safe under a claim"):
        check_options(plan(), {"novelty": 1})
    check_options(plan(claim=False), {"novelty": 1})


# And true.

BREAKING: dict[str, Any] = {
    "aggregator": RageFilter(CorruptionBound(1)),
    "weighting": "num-examples",
    "num_clients": CLIENTS - 1,
    "min_replies": 2,
    "fail_after": 2,
    "enough_replies": 2,
}
HARMLESS: dict[str, Any] = {
    "local_rate": LocalRate(0.125, 0.5, "plateau"),
    "server_step": ServerStep(1.0, 0.0, 1e6),
    "identity": "query",
    "start_timeout": 60.0,
    "min_replies": 1,
    "evaluate_every": 2,
    "output": OutputIterate("best"),
    "shared": ("*",),
    "statistics": "server",
    "seed": 77,
    "observers": [repr],
}


def test_the_examples_are_of_every_option() -> None:
    refused = {name for name, row in OPTIONS.items() if row.verdict == "refused"}
    assert BREAKING.keys() == refused
    assert HARMLESS.keys() | BREAKING.keys() | {"participation"} == OPTIONS.keys()


@pytest.mark.parametrize("option", BREAKING)
def test_what_breaks_the_claim_is_refused_in_one_line(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} = .* breaks the claim: ") as caught:
        DPFedAvg(plan(), **{option: BREAKING[option]})
    assert "claim = False" in str(caught.value)
    assert "\n" not in str(caught.value)
    DPFedAvg(plan(claim=False), **{option: BREAKING[option]})


@pytest.mark.parametrize("number", [1, CLIENTS + 1])
def test_a_run_waits_for_the_plan_s_clients_and_no_others(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_clients = {number} .*; use the plan's num_clients"):
        DPFedAvg(plan(), num_clients=number)
    DPFedAvg(plan(), num_clients=CLIENTS)


def test_participation_is_the_plan_s_with_and_without_a_claim() -> None:
    for claim in (True, False):
        with pytest.raises(ValueError, match="participation is the privacy plan's"):
            DPFedAvg(plan(claim=claim), participation=FullParticipation())


@pytest.mark.parametrize("option", HARMLESS)
def test_the_others_leave_the_sum_and_its_denominator_alone(option: str) -> None:
    """One round of four known clients: the mean of their updates, whatever the option."""
    strategy = DPFedAvg(plan(), **{"local_rate": 0.125, option: HARMLESS[option]})
    result = strategy.start(
        grid(),
        initial_model(),
        num_rounds=1,
        timeout=30.0,
        evaluate_fn=lambda server_round, _: MetricRecord({"accuracy": float(server_round)}),
    )
    bare = DPFedAvg(plan(), local_rate=0.125)
    expected = bare.start(grid(), initial_model(), num_rounds=1, timeout=30.0)
    assert strategy.output_round == 1
    np.testing.assert_allclose(vector_of(result.arrays), vector_of(expected.arrays), atol=1e-5)
    assert strategy.ledger.charges == [(plan().release(), 1)]
    assert not result.evaluate_metrics_clientapp


# The population.


@pytest.mark.parametrize("claim", [True, False])
def test_more_clients_than_planned_are_refused(claim: bool) -> None:
    """r is the plan's: the sum of four clients, divided by two, is a step twice as long."""
    over = grid(4)
    strategy = DPFedAvg(plan(num_clients=2, claim=claim), local_rate=0.125)
    with pytest.raises(ValueError, match="4 clients are not allowed: the privacy plan is for 2"):
        strategy.start(over, initial_model(), num_rounds=1, timeout=30.0)
    assert over.sent == []
    again = DPFedAvg(plan(num_clients=2, claim=claim), local_rate=0.125)
    with pytest.raises(ValueError, match="4 clients are not allowed"):
        list(again.configure_train(1, initial_model(), ConfigRecord(), over))


@pytest.mark.parametrize("there", [True, False])
def test_who_comes_late_is_not_asked_whether_or_not_another_is_there(there: bool) -> None:
    """Otherwise a client's place would keep another out, and the sum would move by both."""
    over = grid(3)
    late = over.nodes.pop(12)
    if not there:
        del over.nodes[10]

    def joins(_: Any) -> None:
        over.nodes[12] = late

    strategy = DPFedAvg(plan(num_clients=2), local_rate=0.125, observers=[joins], start_timeout=0.2)
    strategy.start(over, initial_model(), num_rounds=3, timeout=30.0)
    asked = [m.metadata.dst_node_id for m in over.sent]
    assert asked == 3 * ([10, 11] if there else [11])


def others_asked(over: MemoryGrid) -> list[tuple[int, int]]:
    """Round and node of every message to another node than 10."""
    asked = [(read_round(m).server_round, m.metadata.dst_node_id) for m in over.sent]
    return [(server_round, node) for server_round, node in asked if node != 10]


def test_a_round_lets_in_nobody_whom_one_client_s_being_there_would_have_kept_out() -> None:
    """The others are away for a moment before round 2."""

    class Away(MemoryGrid):
        looks_away = 0

        def get_node_ids(self) -> list[int]:
            self.looks_away -= 1
            return [n for n in super().get_node_ids() if n == 10 or self.looks_away < 0]

    def others(there: bool) -> list[tuple[int, int]]:
        over = Away({node: app for node, app in grid(3).nodes.items() if there or node != 10})

        def leave(_: Any) -> None:
            over.looks_away = 3

        strategy = DPFedAvg(
            plan(num_clients=3), local_rate=0.125, observers=[leave], start_timeout=0.5
        )
        strategy.start(over, initial_model(), num_rounds=2, timeout=30.0)
        return others_asked(over)

    assert others(there=True) == others(there=False) == [(1, 11), (1, 12)]


def test_a_loop_of_one_s_own_waits_for_clients_once_whoever_has_come() -> None:
    def others(there: bool) -> list[tuple[int, int]]:
        over, arrays = grid(3), initial_model()
        late = {node: over.nodes.pop(node) for node in (11, 12)}
        if not there:
            del over.nodes[10]
        strategy = DPFedAvg(plan(num_clients=3), local_rate=0.125, start_timeout=0.2)
        for server_round in (1, 2):
            messages = strategy.configure_train(server_round, arrays, ConfigRecord(), over)
            replies = over.send_and_receive(messages)
            found, _ = strategy.aggregate_train(server_round, replies)
            assert found is not None
            arrays = found
            over.nodes |= late
        return others_asked(over)

    assert others(there=True) == others(there=False) == []


@pytest.mark.parametrize("others", ["leave after a round", "never come"])
@pytest.mark.parametrize("there", [True, False])
def test_whether_a_run_goes_on_does_not_tell_that_one_client_is_there(
    others: str, there: bool
) -> None:
    """All other clients may be the adversary. They leave, and see by the run's end whether it is
    alone with nobody."""

    class Left(MemoryGrid):
        def get_node_ids(self) -> list[int]:
            trained = [m for m in self.sent if m.metadata.message_type == "train"]
            stay = others == "leave after a round" and not trained
            return [node for node in super().get_node_ids() if node == 10 or stay]

    nodes = grid().nodes
    if not there:
        del nodes[10]
    diary: list[int] = []
    strategy = DPFedAvg(
        plan(),
        local_rate=0.125,
        start_timeout=0.2,
        identity="query",
        observers=[lambda report: diary.append(report.server_round)],
    )
    strategy.start(Left(nodes), initial_model(), num_rounds=3, timeout=0.2)
    assert diary == [1, 2, 3]
    assert strategy.ledger.rounds == 3


def test_without_a_claim_a_run_with_nobody_ends() -> None:
    strategy = DPFedAvg(plan(claim=False), local_rate=0.125, start_timeout=0.2)
    with pytest.raises(NotEnoughClients):
        strategy.start(MemoryGrid({}), initial_model(), num_rounds=3, timeout=0.2)


def test_who_comes_beyond_the_population_is_not_asked() -> None:
    """A restarted node is there under two ids for a while, which must not end the run."""
    over = grid(3)
    third = over.nodes.pop(12)
    nodes = over.nodes

    def joins(report: Any) -> None:
        nodes[1] = third  # an id below the others'
        if report.server_round == 2:
            del nodes[11]

    strategy = DPFedAvg(plan(num_clients=2), local_rate=0.125, observers=[joins])
    strategy.start(over, initial_model(), num_rounds=3, timeout=30.0)
    asked = [m.metadata.dst_node_id for m in over.sent]
    assert asked == [10, 11, 10, 11, 10]


def test_a_round_that_no_figure_counts_is_refused_in_a_loop_of_one_s_own() -> None:
    strategy = DPFedAvg(plan(), local_rate=0.125)
    arrays: ArrayRecord | None = initial_model()
    with pytest.raises(ValueError, match="round 4 is not allowed: the privacy plan is for 3"):
        for server_round in range(1, 6):
            over = grid()
            assert arrays is not None
            messages = strategy.configure_train(server_round, arrays, ConfigRecord(), over)
            replies = over.send_and_receive(messages)
            arrays, _ = strategy.aggregate_train(server_round, replies)
    assert strategy.ledger.rounds == 3


# The document.


def test_the_document_has_the_table(repository: Path) -> None:
    text = (repository / "docs" / "privacy.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (safe|adjusted|refused) \| (.+) \|$", text, re.MULTILINE)
    assert {name: (verdict, reason) for name, verdict, reason in found} == {
        name: (row.verdict, row.reason) for name, row in OPTIONS.items()
    }


def test_the_rows_of_the_table_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OPTIONS["seed"].reason = ""  # type: ignore[misc]
    assert isinstance(OPTIONS["seed"], Row)
