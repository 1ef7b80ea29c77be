"""What of a model is w and travels, what is averaged beside it, and what stays; in any dtype."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs
from torch import nn

from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    FatClippingPR,
    FederatedStrategy,
    GFedAvg,
    PrivacyPlan,
    Rage,
    RoundReport,
    ServerStep,
)
from blackthorn.strategies.global_model import GlobalModel
from blackthorn.strategies.layout import Entries
from blackthorn.strategies.run_state import RunState

State = Mapping[str, np.ndarray]
Change = Callable[[dict[str, np.ndarray]], dict[str, Any]]


def app_of(change: Change, **metrics: Any) -> ClientApp:
    """Answers with what `change` makes of the state that it was sent."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        received = message.content.array_records["arrays"]
        state = change({name: array.numpy().copy() for name, array in received.items()})
        arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in state.items()})
        record = MetricRecord({"num-examples": 10, **metrics})
        return Message(RecordDict({"arrays": arrays, "metrics": record}), reply_to=message)

    return app


def grid_of(*changes: Change) -> MemoryGrid:
    return MemoryGrid({10 + i: runs(app_of(change)) for i, change in enumerate(changes)})


def start(
    strategy: FederatedStrategy, grid: MemoryGrid, model: Any, rounds: int = 1, **options: Any
) -> ArrayRecord:
    return strategy.start(grid, model, num_rounds=rounds, timeout=60, **options).arrays


def reports_of(strategy: FederatedStrategy) -> list[RoundReport]:
    reports: list[RoundReport] = []
    strategy._observers.append(reports.append)
    return reports


# Running statistics.


def test_statistics_are_averaged_with_the_weights_of_the_clients() -> None:
    nodes = {10 + i: runs(quadratic_app(i, 10 * (i + 1))) for i in range(3)}
    strategy = GFedAvg(weighting="num-examples", num_clients=3)
    final = start(strategy, MemoryGrid(nodes), initial_model(), 2)
    found = final["norm.running_mean"].numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, (1 * 100 + 2 * 101 + 3 * 102) / 6, rtol=1e-6)
    counter = final["norm.num_batches_tracked"].numpy()
    assert (counter.dtype, counter.shape, int(counter)) == (np.dtype(np.int64), (), 40)


def test_statistics_of_filtered_clients_do_not_count() -> None:
    def lie(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: value - value.dtype.type(1000) for name, value in state.items()}

    nodes = {10 + i: runs(quadratic_app(i)) for i in range(4)} | {20: runs(app_of(lie))}
    strategy = Rage(1, num_clients=5)
    reports = reports_of(strategy)
    final = start(strategy, MemoryGrid(nodes), initial_model())
    assert reports[0].filtered == [20]
    np.testing.assert_allclose(final["norm.running_mean"].numpy(), 101.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("n.running_mean", [0.0, np.nan], "the statistic 'n.running_mean' has values that are not"),
        ("n.running_var", [np.inf, 0.0], "the statistic 'n.running_var' has values that are not"),
        ("n.running_var", [1.0, -1.0], "the statistic 'n.running_var' is a variance below 0"),
        ("n.running_var", [1.0], "n.running_var: shape (1,), expected (2,)"),
    ],
)
def test_a_broken_statistic_rejects_the_reply(name: str, value: list, reason: str) -> None:
    model = {
        "w": np.zeros(3, dtype=np.float32),
        "n.running_mean": np.zeros(2, dtype=np.float32),
        "n.running_var": np.ones(2, dtype=np.float32),
    }

    def broken(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return {**state, "w": state["w"] + 100, name: np.array(value, dtype=np.float32)}

    def well(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return {**state, "w": state["w"] + 1, "n.running_var": state["n.running_var"] + 2}

    strategy = GFedAvg()
    reports = reports_of(strategy)
    arrays = ArrayRecord({key: Array(one) for key, one in model.items()})
    final = start(strategy, grid_of(broken, well), arrays)
    assert [lost.client for lost in reports[0].rejected] == [10]
    assert reason in reports[0].rejected[0].reason
    assert final["w"].numpy().tolist() == [1, 1, 1]
    assert final["n.running_var"].numpy().tolist() == [3, 3]


def test_equal_statistics_stay_what_they_are_to_the_last_bit() -> None:
    third = np.full(5, 1 / 3, dtype=np.float32)
    model = GlobalModel.of(ArrayRecord({"w": Array(third), "a.running_mean": Array(third * 0)}))
    rows = np.tile(third.astype(np.float64), (3, 1))
    model.average_statistics(rows, np.array([0.1, 0.7, 0.2]))
    assert model.arrays()["a.running_mean"].numpy().tolist() == third.tolist()


def test_local_statistics_need_a_client_that_says_it_keeps_them() -> None:
    for attests in (False, True):
        nodes = {10 + i: runs(quadratic_app(i, attests=attests)) for i in range(2)}
        strategy = GFedAvg(statistics="local")
        reports = reports_of(strategy)
        final = start(strategy, MemoryGrid(nodes), initial_model())
        assert len(reports[0].accepted) == (2 if attests else 0)
        assert final["norm.running_mean"].numpy().tolist() == [5, 5, 5]
        if not attests:
            assert "mods=[blackthorn.client_app.mod]" in reports[0].rejected[0].reason


def test_another_word_for_statistics_is_refused() -> None:
    with pytest.raises(ValueError, match="statistics = 'mine' is not allowed: average, server, lo"):
        GFedAvg(statistics="mine")  # type: ignore[arg-type]


def test_an_average_of_statistics_is_refused_under_a_claim() -> None:
    plan = PrivacyPlan(ClipNorm(1.0), noise_multiplier=1.0, num_clients=2, rounds=1)
    line = "statistics = 'average' is not allowed under a privacy claim: 'norm.running_mean'"
    grid = MemoryGrid({10 + i: runs(quadratic_app(i)) for i in range(2)})
    with pytest.raises(ValueError, match=line):
        start(DPFedAvg(plan), grid, initial_model())
    assert grid.sent == []


def test_a_resumed_run_goes_on_with_its_statistics() -> None:
    def drift(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: value + value.dtype.type(1) / 2 for name, value in state.items()}

    arrays = ArrayRecord(
        {
            "w": Array(np.zeros(3, dtype=np.float32)),
            "n.running_mean": Array(np.full(2, 0.1, dtype=np.float32)),
        }
    )
    whole = start(GFedAvg(), grid_of(drift, drift), arrays, 4)
    strategy, states = GFedAvg(), list[RunState]()
    strategy._observers.append(lambda _: states.append(strategy.state()))
    start(strategy, grid_of(drift, drift), arrays, 2)
    resumed = start(GFedAvg(), grid_of(drift, drift), arrays, 4, from_state=states[-1])
    assert whole["n.running_mean"].numpy().tolist() != [0.1, 0.1]
    for name in whole:
        assert whole[name].numpy().tolist() == resumed[name].numpy().tolist()


# Modules.


class Tied(nn.Module):
    """A tied head, a scalar, a frozen layer, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)


def test_a_module_says_what_is_tied_frozen_and_a_buffer() -> None:
    found = Entries.of_module(Tied())
    assert found.parameters == ("logit_scale", "embed.weight", "norm.weight", "norm.bias")
    assert found.copies == {"head.weight": "embed.weight"}
    assert found.frozen == ("frozen.weight", "frozen.bias")
    assert found.statistics == ("norm.running_mean", "norm.running_var")


def test_what_is_tied_counts_once_and_what_is_frozen_does_not_travel() -> None:
    module = Tied()
    frozen = module.frozen.weight.detach().clone()
    seen: list[set[str]] = []

    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        seen.append(set(state))
        np.testing.assert_array_equal(state["head.weight"], state["embed.weight"])
        # A copy that says something else is not heard.
        head = state["head.weight"] - 9
        return {**state, "embed.weight": state["embed.weight"] + 1, "head.weight": head}

    strategy = FatClippingPR(1e3)
    reports = reports_of(strategy)
    final = start(strategy, grid_of(train, train), module, 2)
    assert reports[0].updates is not None
    assert reports[0].updates.shape == (2, 1 + 24 + 4 + 4)
    assert set(final) == set(module.state_dict())
    assert all(names == set(final) - {"frozen.weight", "frozen.bias"} for names in seen)
    np.testing.assert_allclose(
        final["head.weight"].numpy(), module.embed.weight.detach() + 2, rtol=1e-6
    )
    np.testing.assert_array_equal(final["head.weight"].numpy(), final["embed.weight"].numpy())
    np.testing.assert_array_equal(final["frozen.weight"].numpy(), frozen)
    assert final["logit_scale"].numpy().shape == ()
    module.load_state_dict(final.to_torch_state_dict())


def test_a_tied_parameter_goes_by_the_name_that_travels() -> None:
    """The second name matches, the first does not: it is w, and both are what was learnt."""
    module, seen = Tied(), list[set[str]]()

    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        seen.append(set(state))
        return {**state, "head.weight": state["head.weight"] + 1}

    final = start(GFedAvg(shared=["head.*"]), grid_of(train, train), module, 2)
    assert seen == [{"head.weight"}] * 4
    for name in ("head.weight", "embed.weight"):
        expected = module.embed.weight.detach() + 2
        np.testing.assert_allclose(final[name].numpy(), expected, rtol=1e-6)


def test_only_what_is_shared_travels() -> None:
    module = nn.Sequential(OrderedDict(body=nn.Linear(3, 3), head=nn.Linear(3, 2)))
    first = {name: value.clone() for name, value in module.state_dict().items()}

    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        assert set(state) == {"head.weight", "head.bias"}
        # A client that sends all it has is heard for what is shared.
        own = {name: value.numpy() + 5 for name, value in first.items() if "body" in name}
        return {**{name: value + 1 for name, value in state.items()}, **own}

    final = start(GFedAvg(shared=["head.*"]), grid_of(train, train), module)
    for name, value in first.items():
        np.testing.assert_allclose(final[name].numpy(), value + (1 if "head" in name else 0))


def test_a_pattern_that_fits_nothing_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"shared = 'adapter\.\*' is not allowed: no entry has"):
        start(GFedAvg(shared=["adapter.*"]), grid_of(dict, dict), nn.Linear(2, 2))


# Dtypes and shapes.


def test_half_precision_is_averaged_in_float32() -> None:
    """Steps of 2^-13 near 1 are lost in float16: a hundred of them are not."""

    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"w": state["w"] * np.float16(1 - 2**-10)}

    def stay(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return state

    arrays = ArrayRecord({"w": Array(np.ones(4, dtype=np.float16))})
    strategy = GFedAvg(num_clients=8)
    final = start(strategy, grid_of(train, *[stay] * 7), arrays, 100)
    assert final["w"].numpy().dtype == np.float16
    expected = (1 - 2**-13) ** 100
    np.testing.assert_allclose(final["w"].numpy().astype(float), expected, rtol=1e-3)


def test_a_float16_model_that_would_become_infinite_stays() -> None:
    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"w": state["w"] - np.float16(4000)}

    arrays = ArrayRecord({"w": Array(np.full(2, -60000, dtype=np.float16))})
    strategy = GFedAvg(server_step=ServerStep(2.0))
    reports = reports_of(strategy)
    final = start(strategy, grid_of(train, train), arrays)
    assert final["w"].numpy().tolist() == [-60000, -60000]
    assert reports[0].skipped is not None
    assert "'w' would not stay finite in float16" in reports[0].skipped


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_honest_clients_are_not_over_the_bound_in_half_precision(dtype: str) -> None:
    """They clip in their precision, and round once more when they send."""
    rng = np.random.default_rng(1)

    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        step = rng.normal(size=1000)
        step *= 0.1 / np.linalg.norm(step)
        return {"w": (state["w"].astype(np.float64) + step).astype(dtype)}

    arrays = ArrayRecord({"w": Array(rng.normal(size=1000).astype(dtype))})
    strategy = FatClippingPR(0.1 * (1 + 1e-9), num_clients=4)
    reports = reports_of(strategy)
    start(strategy, grid_of(*[train] * 4), arrays, 3)
    assert [report.over_bound for report in reports] == [[], [], []]


def test_a_bfloat16_module_travels_as_float32_with_numbers_of_bfloat16() -> None:
    module = nn.Linear(3, 2).bfloat16()
    seen: list[np.dtype] = []

    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        seen.append(state["weight"].dtype)
        return {name: value + 1 for name, value in state.items()}

    final = start(GFedAvg(), grid_of(train, train), module)
    assert set(seen) == {np.dtype(np.float32)}
    expected = (module.weight.detach() + 1).float()
    np.testing.assert_array_equal(final["weight"].numpy(), expected.numpy())
    # As coarse as its clients compute.
    assert GlobalModel.of(module).layout.precision == torch.finfo(torch.bfloat16).eps


def test_a_dtype_that_numpy_does_not_have_is_one_line() -> None:
    arrays = ArrayRecord({"w": Array(np.zeros(3, dtype="V2"))})
    with pytest.raises(ValueError, match="'w' is of a dtype that NumPy does not have"):
        start(GFedAvg(), grid_of(dict, dict), arrays)


def test_scalars_empty_and_transposed_arrays_keep_their_shapes() -> None:
    first = {
        "scale": np.array(2.0, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "strided": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    }

    def train(state: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: np.asfortranarray(value + 1) for name, value in state.items()} | {
            "scale": state["scale"] + np.float32(1)
        }

    arrays = ArrayRecord({name: Array(value) for name, value in first.items()})
    final = start(GFedAvg(), grid_of(train, train), arrays, 2)
    for name, value in first.items():
        assert final[name].numpy().shape == value.shape
        np.testing.assert_array_equal(final[name].numpy(), value + 2)
