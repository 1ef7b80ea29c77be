"""A model of less precision than what travels: rounding what was loaded is no update."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid, runs
from torch import nn

from blackthorn.client_app import Round, mod
from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FederatedStrategy,
    GFedAvg,
    PrivacyPlan,
    RoundReport,
)
from blackthorn.strategies.layout import as_held

HALVES = [torch.bfloat16, torch.float16]
STEP = 2.0**-6


def network() -> nn.Module:
    """A norm's weights are all alike when they are rounded, which is no tie."""
    torch.manual_seed(3)
    norms = nn.LayerNorm(5), nn.LayerNorm(5)
    for norm in norms:
        nn.init.normal_(norm.weight, 1.0, 1e-5)
    return nn.Sequential(nn.Linear(4, 5), *norms, nn.Linear(5, 2))


def private(kind: Any, location: Any = "server") -> FederatedStrategy:
    plan = PrivacyPlan(ClipNorm(1.0), 1e-3, 1, 2, delta=0.01, noise_location=location, claim=False)
    return kind(plan, local_rate=1.0)


def trained_in(dtype: torch.dtype, step: float, by_arrays: bool, mods: Any = (mod,)) -> ClientApp:
    """Trains the first layer's bias by `step`, in `dtype`, and answers by arrays or by Round."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, _: Any) -> Message:
        model = network().to(dtype)
        arrays = message.content.array_records["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            model.get_parameter("0.bias").add_(step)
        if not by_arrays:
            return Round.of(message).reply(model)
        # NumPy has no bfloat16; float16 is sent as what it is expected to be.
        moved = {k: Array(v.float().numpy()) for k, v in model.state_dict().items()}
        metrics = MetricRecord({"num-examples": 7})
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def rounds_with(
    strategy: FederatedStrategy, app: ClientApp, start: Any, rounds: int = 1
) -> tuple[list[tuple[ArrayRecord, Message]], list[RoundReport]]:
    """What the one client was sent and answered, and the reports."""
    seen, reports = list[tuple[ArrayRecord, Message]](), list[RoundReport]()
    inner = runs(app, **{"partition-id": 0})

    def answer(message: Message) -> Message | None:
        sent = copy.deepcopy(message.content.array_records.get("arrays"))
        reply = inner(message)
        if message.metadata.message_type == "train" and sent is not None and reply is not None:
            seen.append((sent, reply))
        return reply

    strategy._observers.append(reports.append)
    strategy.start(MemoryGrid({10: answer}), start, num_rounds=rounds, timeout=60)
    return seen, reports


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("by_arrays", [False, True])
@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
def test_who_trains_nothing_sends_what_was_sent(
    kind: Any, by_arrays: bool, dtype: torch.dtype
) -> None:
    start = ArrayRecord(network().state_dict())
    ((sent, reply),), (report,) = rounds_with(
        private(kind), trained_in(dtype, 0.0, by_arrays), start
    )
    assert report.accepted == [10]
    for name, array in reply.content.array_records["arrays"].items():
        np.testing.assert_array_equal(array.numpy(), sent[name].numpy())
    assert report.updates is not None
    assert not report.updates.any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("by_arrays", [False, True])
def test_only_what_was_trained_is_normed_with_noise_of_the_client(
    by_arrays: bool, dtype: torch.dtype
) -> None:
    """All of the length C is in the one layer that moved; the noise is a thousandth of it."""
    strategy = private(DPNormFedAvg, "client")
    start = ArrayRecord(network().state_dict())
    _, (report,) = rounds_with(strategy, trained_in(dtype, STEP, by_arrays), start)
    assert report.updates is not None
    assert report.accepted == [10]
    moved = torch.zeros_like(report.updates[0])
    names = [name for name, _ in network().named_parameters()]
    sizes = [one.numel() for one in network().parameters()]
    at = sum(sizes[: names.index("0.bias")])
    moved[at : at + 5] = -1 / 5**0.5
    # A step in the coarser dtype is rounded, too.
    torch.testing.assert_close(report.updates[0], moved, atol=0.15, rtol=0)
    still = report.updates[0][moved == 0]
    assert float(still.abs().max()) < 0.01


@pytest.mark.parametrize("dtype", HALVES)
def test_a_server_that_holds_the_module_counts_by_what_it_sent_to_any_app(
    dtype: torch.dtype,
) -> None:
    """Without the mod, and in the second round, when w has been noised in float32."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Any) -> Message:
        model = network().to(dtype)
        arrays = message.content.array_records["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict())
        wide = {name: sent.numpy().dtype for name, sent in arrays.items()}
        moved = {k: Array(v.float().numpy().astype(wide[k])) for k, v in model.state_dict().items()}
        metrics = MetricRecord({"num-examples": 7})
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
        return Message(content, reply_to=message)

    seen, reports = rounds_with(private(DPNormFedAvg), app, network().to(dtype), 2)
    assert len(seen) == 2
    for report in reports:
        assert report.updates is not None
        assert not report.updates.any()


def test_steps_too_small_for_the_clients_dtype_add_up_at_the_server() -> None:
    """Nine clients of ten are still: a round moves w by less than bfloat16 tells apart."""
    app = trained_in(torch.bfloat16, STEP, by_arrays=True)
    still = trained_in(torch.bfloat16, 0.0, by_arrays=True)
    answers = {i: runs(app if i == 0 else still, **{"partition-id": i}) for i in range(10)}
    first = network().state_dict()
    with torch.no_grad():
        first["0.bias"].fill_(1.001)
    result = GFedAvg(local_rate=1.0, num_clients=10).start(
        MemoryGrid(answers), ArrayRecord(first), num_rounds=4, timeout=60
    )
    moved = result.arrays["0.bias"].numpy()
    np.testing.assert_allclose(moved, 1.001 + 4 * STEP / 10, atol=1e-5)


def test_an_entry_is_held_in_the_coarsest_dtype_that_has_all_its_trained_values() -> None:
    rng = np.random.default_rng(2)
    sent = {name: rng.normal(size=50) for name in ("bfloat16", "float16", "float32", "float64")}
    kinds = {name: getattr(torch, name) for name in sent}
    trained = {
        k: (torch.from_numpy(v) + 0.5).to(kinds[k]).double().numpy() for k, v in sent.items()
    }
    held = as_held(sent, trained, list(sent))
    for name, value in sent.items():
        rounded = torch.from_numpy(value).to(kinds[name]).double().numpy()
        np.testing.assert_array_equal(held[name], rounded)
