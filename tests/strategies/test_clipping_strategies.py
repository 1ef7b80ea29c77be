"""FAT-Clipping, CE-FedAvg and model clipping: whole runs against the algorithms in NumPy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_runs import configuration, model, run
from flwr.app import Array, ArrayRecord, Message, RecordDict

from blackthorn.recording.run_folder import read_metrics
from blackthorn.server_app.run import execute, prepare
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import (
    CEFedAvg,
    FatClippingPI,
    FatClippingPR,
    ModelClipping,
    NormBound,
    RoundContext,
)
from blackthorn.strategies.bounding import ClipNorm

Vector = np.ndarray


# The algorithms, in NumPy, for logistic regression from w_1 = 0 with full batches.


def clip(z: Vector, c: float) -> Vector:
    length = np.sqrt((z * z).sum())
    return z if length <= c else z * (c / length)


@dataclass
class ByHand:
    """GFedAvg and its clipped variants; `clipped` counts what was shortened, and `whole` not."""

    shards: list[tuple[np.ndarray, np.ndarray]]
    local_lr: float
    server_lr: float
    steps: int
    rounds: int
    decay: float = 1.0
    counts: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    def clip(self, z: Vector, c: float) -> Vector:
        self.counts[bool(np.linalg.norm(z) > c)] += 1
        return clip(z, c)

    def gradient(self, w: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        weight, bias = w[:640].reshape(10, 64), w[640:]
        logits = x @ weight.T + bias
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = odds / odds.sum(axis=1, keepdims=True) - np.eye(10)[y]
        return np.concatenate([(error.T @ x).ravel(), error.sum(axis=0)]) / len(x)

    def sum_of_gradients(
        self, w: Vector, shard: tuple[np.ndarray, np.ndarray], lr: float, step_clip: float
    ) -> Vector:
        total = np.zeros_like(w)
        for _ in range(self.steps):
            gradient = self.gradient(w - lr * total, *shard)
            total += gradient if step_clip == np.inf else self.clip(gradient, step_clip)
        return total

    def run(
        self,
        change: Callable[[Vector, Vector, float], Vector],
        step_clip: Callable[[float], float] = lambda _: np.inf,
    ) -> Vector:
        """w after all rounds. `change(w, u, lr)` is what a client with update u adds to w."""
        w, lr = np.zeros(650), self.local_lr
        for _ in range(self.rounds):
            updates = [self.sum_of_gradients(w, shard, lr, step_clip(lr)) for shard in self.shards]
            w = w + self.server_lr * np.mean([change(w, u, lr) for u in updates], axis=0)
            lr *= self.decay
        return w

    # c in parameter units is c/lr in gradient units, for λ the other way round.

    def pr(self, bound: float, units: str) -> Vector:
        def change(_: Vector, u: Vector, lr: float) -> Vector:
            return -lr * self.clip(u, bound if units == "gradient" else bound / lr)

        return self.run(change)

    def pi(self, bound: float, units: str) -> Vector:
        return self.run(
            lambda _, u, lr: -lr * u, lambda lr: bound if units == "gradient" else bound / lr
        )

    def ce(self, bound: float, units: str) -> Vector:
        def change(_: Vector, u: Vector, lr: float) -> Vector:
            return self.clip(-lr * u, bound if units == "parameter" else bound * lr)

        return self.run(change)

    def model_clipping(self, bound: float) -> Vector:
        return self.run(lambda w, u, lr: self.clip(w - lr * u, bound) - w)


RUN: dict[str, Any] = {"local_lr": 0.4, "server_lr": 0.8, "local_lr_decay": 0.7}


def by_hand(folder: Path) -> ByHand:
    shards = prepare(configuration(folder, dtype="float64", **RUN)).problem.shards()
    generator = np.random.default_rng(0)
    data = [shard.batch(generator, 0) for shard in shards]
    arrays = [(x.double().flatten(1).numpy(), y.numpy()) for x, y in data]
    assert [len(x) for x, _ in arrays] == [50] * 4
    return ByHand(arrays, 0.4, 0.8, steps=4, rounds=3, decay=0.7)


PARAMETER, GRADIENT = {"clip_units": "parameter"}, {"clip_units": "gradient"}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[ByHand], Vector]]] = {
    "pr": ("fat-clipping-pr", {"clip_norm": 4.15}, lambda h: h.pr(4.15, "gradient")),
    "pr-parameter": (
        "fat-clipping-pr",
        {"clip_norm": 1.15, **PARAMETER},
        lambda h: h.pr(1.15, "parameter"),
    ),
    "pi": ("fat-clipping-pi", {"clip_norm": 1.0}, lambda h: h.pi(1.0, "gradient")),
    "pi-parameter": (
        "fat-clipping-pi",
        {"clip_norm": 0.3, **PARAMETER},
        lambda h: h.pi(0.3, "parameter"),
    ),
    "ce": ("ce-fedavg", {"clip_norm": 1.15}, lambda h: h.ce(1.15, "parameter")),
    "ce-gradient": (
        "ce-fedavg",
        {"clip_norm": 4.15, **GRADIENT},
        lambda h: h.ce(4.15, "gradient"),
    ),
    "model-clipping": (
        "model-clipping",
        {"clip_norm": 1.37},
        lambda h: h.model_clipping(1.37),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_runs_against_numpy(tmp_path: Path, case: str) -> None:
    algorithm, options, expected = CASES[case]
    hand = by_hand(tmp_path)
    wanted = expected(hand)
    # Some are clipped and some are not, or one of the branches is not tested.
    assert min(hand.counts.values()) > 0, hand.counts
    for dtype, tolerance in (("float64", 1e-11), ("float32", 2e-6)):
        folder = tmp_path / dtype
        entries = run(folder, algorithm=algorithm, dtype=dtype, instruments=False, **RUN, **options)
        assert np.linalg.norm(model(folder) - wanted) < tolerance * np.linalg.norm(wanted)
        assert all(entry["over_bound"] == [] for entry in entries)


# Units.


def test_parameter_units_are_local_lr_times_gradient_units() -> None:
    for local_lr in (0.1, 0.37, 2.0):
        parameter = ClipNorm(0.6, "parameter").in_gradient_units(local_lr)
        assert local_lr * parameter == pytest.approx(0.6)
        assert ClipNorm(0.6, "gradient").in_gradient_units(local_lr) == 0.6


@pytest.mark.parametrize("algorithm", ["fat-clipping-pr", "fat-clipping-pi", "ce-fedavg"])
def test_the_same_threshold_in_either_unit(tmp_path: Path, algorithm: str) -> None:
    """At a constant rate C_parameter = η_l C_gradient; once the rate decays, they part."""

    def final(name: str, clip_norm: float, units: str, decay: float) -> Vector:
        folder = tmp_path / name
        run(
            folder,
            algorithm=algorithm,
            clip_norm=clip_norm,
            clip_units=units,
            local_lr=0.25,
            local_lr_decay=decay,
            dtype="float64",
            instruments=False,
        )
        return model(folder)

    gradient = final("gradient", 0.8, "gradient", 1.0)
    np.testing.assert_allclose(final("parameter", 0.2, "parameter", 1.0), gradient, atol=1e-13)
    apart = final("decayed", 0.8, "gradient", 0.5) - final("and", 0.2, "parameter", 0.5)
    assert np.linalg.norm(apart) > 0.01 * np.linalg.norm(gradient)


def test_ce_fedavg_is_pr_in_the_other_unit() -> None:
    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    context = RoundContext(1, 0.1, torch.zeros(2))
    ce, pr = CEFedAvg(0.2), FatClippingPR(0.2)
    assert ce.norm_bound(context).norm == pytest.approx(2.0)
    assert pr.norm_bound(context).norm == 0.2
    expected = torch.tensor([[1.2, 1.6], [0.3, 0.4]])
    torch.testing.assert_close(ce.bound(updates, context), expected)


def test_pi_bounds_the_sum_of_its_steps() -> None:
    pi, context = FatClippingPI(0.5, 10), RoundContext(1, 0.1, torch.zeros(2))
    assert pi.norm_bound(context) == NormBound(5.0, roundings=10)
    in_parameters = FatClippingPI(0.5, 10, clip_units="parameter")
    assert in_parameters.norm_bound(context).norm == pytest.approx(50)
    bounded = pi.bound(torch.tensor([[30.0, 40.0], [3.0, 4.0]]), context)
    torch.testing.assert_close(bounded, torch.tensor([[3.0, 4.0], [3.0, 4.0]]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FatClippingPR(0.0),
        lambda: FatClippingPI(-1.0, 5),
        lambda: FatClippingPI(1.0, 0),
        lambda: CEFedAvg(float("nan")),
        lambda: ModelClipping(0.0),
    ],
)
def test_thresholds_that_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        make()


# Who sent more than the bound.

ALGORITHMS: dict[str, dict[str, Any]] = {
    "pr": {"algorithm": "fat-clipping-pr", "clip_norm": 2.0},
    "pr-parameter": {
        "algorithm": "fat-clipping-pr",
        "clip_norm": 0.2,
        "clip_units": "parameter",
        "local_lr_decay": 0.5,
    },
    "ce": {"algorithm": "ce-fedavg", "clip_norm": 0.2, "local_lr_decay": 0.5},
    "pi": {"algorithm": "fat-clipping-pi", "clip_norm": 0.5, "local_lr_decay": 0.5},
    "pi-parameter": {
        "algorithm": "fat-clipping-pi",
        "clip_norm": 0.05,
        "clip_units": "parameter",
        "local_lr_decay": 0.5,
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("attack", ["huge", "reverse-scaled-average"])
def test_exactly_the_attackers_are_over_the_bound(tmp_path: Path, name: str, attack: str) -> None:
    entries = run(
        tmp_path,
        num_clients=9,
        num_byzantine=2,
        attack=attack,
        batch_size=16,
        instruments=False,
        **ALGORITHMS[name],
    )
    assert [entry["over_bound"] for entry in entries] == [[7, 8]] * 3


def test_only_the_attackers_of_the_round_are_named(tmp_path: Path) -> None:
    """Attackers drawn afresh, in cohorts drawn afresh: ids, not rows of the round's matrix."""
    reports: list[Any] = []
    run(
        tmp_path,
        [reports.append],
        num_clients=12,
        num_byzantine=4,
        byzantine_set="redrawn",
        attack="reverse-scaled-average",
        participation="fixed",
        clients_per_round=6,
        num_server_rounds=6,
        instruments=False,
        **ALGORITHMS["pr"],
    )
    named = []
    for report in reports[1:]:
        norms = report.updates.double().norm(dim=1).tolist()
        longer = [c for c, n in zip(report.accepted, norms, strict=True) if n > 2.001]
        assert report.over_bound == longer
        assert all(n > 20 or n < 2.0001 for n in norms)
        named += longer
    assert len(set(named)) > 2


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"algorithm": "ce-fedavg", "clip_norm": 2e-6}, 2e-3),
        ({"algorithm": "fat-clipping-pr", "clip_norm": 2e-3}, 2e-3),
        # Single steps of 1e-6 are rounded the same way every time, and add up.
        ({"algorithm": "fat-clipping-pi", "clip_norm": 1e-3, "local_steps": 400}, 0.4),
    ],
)
def test_rounding_puts_nobody_beyond_the_bound(
    tmp_path: Path, options: dict[str, Any], bound: float
) -> None:
    """w_i = w - η_l u in float32 is off by more than u is allowed to be: d = 15010, ‖w‖ = 21."""
    reports: list[Any] = []
    run(
        tmp_path,
        [reports.append],
        model="mlp-200",
        num_server_rounds=1,
        num_clients=3,
        local_lr=1e-3,
        instruments=False,
        **options,
    )
    assert float(reports[1].updates.double().norm(dim=1).max()) > 1.001 * bound
    assert reports[1].over_bound == []


class StretchingGrid(EngineGrid):
    """Clients 1 and 2 send w - factor · (w - w_i) in place of w_i."""

    factor = 1.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        sent = list(messages)
        replies = super().send_and_receive(sent, timeout=timeout)
        return [self._stretch(m, r) for m, r in zip(sent, replies, strict=True)]

    def _stretch(self, message: Message, reply: Message) -> Message:
        if not message.metadata.message_type.startswith("train"):
            return reply
        if message.content.config_records["config"]["client-id"] not in (1, 2):
            return reply
        start, trained = (m.content.array_records["arrays"] for m in (message, reply))
        stretched = {}
        for name, array in trained.items():
            w = start[name].numpy()
            stretched[name] = Array(w - np.float32(self.factor) * (w - array.numpy()))
        metrics = reply.content.metric_records["metrics"]
        content = RecordDict({"arrays": ArrayRecord(stretched), "metrics": metrics})
        return Message(content, reply_to=message)


@pytest.mark.parametrize(("factor", "expected"), [(1.001, [1, 2]), (1.0, []), (0.5, [])])
@pytest.mark.parametrize("algorithm", ["fat-clipping-pr", "ce-fedavg"])
def test_a_thousandth_too_long_is_seen(
    tmp_path: Path, algorithm: str, factor: float, expected: list[int]
) -> None:
    config = configuration(
        tmp_path, model="mlp-200", algorithm=algorithm, clip_norm=0.05, instruments=False
    )
    prepared = prepare(config)
    grid = StretchingGrid(config, prepared.problem)
    grid.factor = factor
    execute(prepared, grid)
    assert [entry["over_bound"] for entry in read_metrics(tmp_path)[1:]] == [expected] * 3


def test_what_is_over_the_bound_counts_as_the_bound(tmp_path: Path) -> None:
    """The server clips again: an attacker's 1e25 moves the mean by λ/m, in its direction."""
    reports: list[Any] = []
    run(
        tmp_path,
        [reports.append],
        algorithm="fat-clipping-pr",
        clip_norm=2.0,
        num_byzantine=1,
        attack="huge",
        num_server_rounds=1,
        dtype="float64",
        instruments=False,
    )
    report = reports[1]
    u = report.updates.numpy()
    assert np.linalg.norm(u[3]) > 1e24
    expected = np.mean([clip(row, 2.0) for row in u], axis=0)
    np.testing.assert_allclose(report.aggregate.numpy(), expected, atol=1e-12)


def test_model_clipping_accuses_nobody(tmp_path: Path) -> None:
    """Its threshold is on models: no update is too long. The honest clip theirs themselves."""
    reports: list[Any] = []
    entries = run(
        tmp_path,
        [reports.append],
        algorithm="model-clipping",
        clip_norm=0.5,
        num_byzantine=1,
        attack="reverse-scaled-average",
        instruments=False,
    )
    assert [entry["over_bound"] for entry in entries] == [[]] * 3
    assert np.linalg.norm(model(tmp_path)) <= 0.5 * (1 + 1e-6)
    for before, report in pairwise(reports):
        local_models = before.model - report.local_lr * report.updates
        lengths = local_models.double().norm(dim=1)
        assert lengths[:3].tolist() == pytest.approx([0.5] * 3, rel=1e-5)
        assert lengths[3] > 5
