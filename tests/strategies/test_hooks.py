"""Hooks get what is known of a round, and what they give back is what happens."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from memory_grid import (
    DIMENSION,
)
from rounds_by_hand import (
    NODES,
    Diary,
    attacker,
    by_hand,
    close,
    honest_grid,
    run,
)

from blackthorn.strategies import (
    CohortPlan,
    GFedAvg,
    LocalRule,
    NormBound,
    RoundContext,
)
from blackthorn.strategies.aggregation import Aggregate
from blackthorn.strategies.rounds import RunOver


def test_every_hook_gets_what_is_known_of_the_round_so_far_and_can_change_none_of_it() -> None:
    """The values are the test's own record of what each hook was called with, in order."""
    called: list[tuple[str, RoundContext]] = []

    class Watched(GFedAvg):
        def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
            called.append(("draw_cohort", context))
            return CohortPlan.of(list(clients)[:3])

        def local_rule(self, context: RoundContext) -> LocalRule:
            called.append(("local_rule", context))
            return super().local_rule(context)

        def norm_bound(self, context: RoundContext) -> NormBound:
            called.append(("norm_bound", context))
            return super().norm_bound(context)

        def combine(
            self, updates: torch.Tensor, weights: torch.Tensor, context: RoundContext
        ) -> Aggregate:
            called.append(("combine", context))
            return super().combine(updates, weights, context)

        def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
            called.append(("bound", context))
            return super().bound(updates, context)

    grid = honest_grid()
    first, second, third = sorted(NODES[:5])[:3]
    grid.nodes[second] = attacker("nan")
    run(Watched(local_rate=0.5, num_clients=5), grid, rounds=1)
    assert [name for name, _ in called] == [
        "draw_cohort",
        "local_rule",
        "norm_bound",
        "combine",
        "bound",
    ]
    for position, (_, context) in enumerate(called):
        assert (context.server_round, context.local_lr) == (1, 0.5)
        np.testing.assert_array_equal(context.model.numpy(), np.arange(DIMENSION) / 4)
        assert context.population == tuple(sorted(NODES[:5]))
        assert context.cohort.clients == ([] if position == 0 else [first, second, third])
        assert context.accepted == (() if position < 2 else (first, third))
        with pytest.raises(dataclasses.FrozenInstanceError):
            context.local_lr = 1.0  # type: ignore[misc]


def test_a_client_weighs_as_often_as_the_plan_counts_it() -> None:
    class Twice(GFedAvg):
        def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
            del context
            return CohortPlan({c: 2 if c == NODES[1] else 1 for c in sorted(clients)})

    expected = by_hand([range(3)] * 2, weights={0: 1, 1: 2, 2: 1})
    close(run(Twice(num_clients=3), honest_grid(3), rounds=2), expected[-1])


def test_a_plan_tells_a_client_what_no_other_is_told() -> None:
    class Telling(GFedAvg):
        def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
            plan = super().draw_cohort(clients, context)
            return CohortPlan(plan.counts, {NODES[1]: {"share": 0.25}})

    grid = honest_grid(3)
    run(Telling(num_clients=3), grid, rounds=1)
    told = {
        m.metadata.dst_node_id: m.content.config_records["config"].get("share")
        for m in grid.sent
        if m.metadata.message_type == "train"
    }
    assert told == {NODES[0]: None, NODES[1]: 0.25, NODES[2]: None}


def test_a_run_that_is_over_ends_with_the_round_that_says_so() -> None:
    class Spent(GFedAvg):
        def combine(
            self, updates: torch.Tensor, weights: torch.Tensor, context: RoundContext
        ) -> Aggregate:
            if context.server_round == 3:
                raise RunOver("nothing is left")
            return super().combine(updates, weights, context)

    diary = Diary()
    found = run(Spent(num_clients=5, observers=[diary]), honest_grid(), rounds=9)
    assert [report.server_round for report in diary.reports] == [1, 2, 3]
    assert diary.reports[-1].skipped == "the updates cannot be aggregated: nothing is left"
    close(found, by_hand([range(5)] * 2)[-1])


def test_a_norm_beyond_the_bound_and_its_roundings_is_told() -> None:
    model, step = torch.full((4,), 100.0), 2.0**-23
    # ‖w‖ = 200, so that one rounding is 200 · 2^-23 in parameter units.
    updates = torch.tensor([[1.0, 0, 0, 0], [1.0 + 300 * step, 0, 0, 0], [1.1, 0, 0, 0]])
    once, twice = NormBound(1.0), NormBound(1.0, roundings=2)
    assert once.exceeded(updates, model, 1.0).tolist() == [False, True, True]
    assert twice.exceeded(updates, model, 1.0).tolist() == [False, False, True]
    assert NormBound(math.inf).exceeded(updates, model, 1.0).tolist() == [False] * 3
