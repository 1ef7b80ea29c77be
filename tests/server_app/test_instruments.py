"""What a round's updates look like: against plain NumPy, and in the files of a run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_runs import run, summary_of
from rich.console import Console

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import RunFolder, read_metrics, write_failure
from blackthorn.reporting.run_plots import draw_plots
from blackthorn.reporting.run_record import read_record
from blackthorn.server_app.instruments import Instruments
from blackthorn.settings.config import RunConfig
from blackthorn.strategies.instruments import (
    TAIL_LEAST_CLIENTS,
    inverse_noise_index,
    measure_updates,
    pooled_tail_index,
)
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.tail_index import tail_index

PLOTS = ["update-norms.png", "update-angles.png", "update-spread.png", "tail-index.png"]


def naive_angle(u: np.ndarray, v: np.ndarray) -> float:
    cosine = u @ v / (np.sqrt(u @ u) * np.sqrt(v @ v))
    return float(np.degrees(np.arccos(cosine)))


# Vectors, against NumPy.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7, 3), (8, 300_000)])
def test_measures_are_numpy_s(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(1)
    updates = torch.tensor(generator.standard_normal(shape) * 3 + 0.5, dtype=dtype)
    last = torch.tensor(generator.standard_normal(shape[1]) + 0.4, dtype=dtype)
    before = updates.clone()
    u, v = updates.double().numpy(), last.double().numpy()
    norms = np.sqrt((u**2).sum(axis=1))
    bound = float(np.sort(norms)[3])  # some are shorter, some longer
    found = measure_updates(updates, 0.25, last, bound)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-12)
    np.testing.assert_allclose(found.parameter_norms, norms / 4, rtol=1e-12)
    np.testing.assert_allclose(found.angles, [naive_angle(row, v) for row in u], rtol=1e-9)
    spread = np.sqrt(((norms - norms.mean()) ** 2).mean())
    assert found.variation == pytest.approx(spread / norms.mean(), rel=1e-9)
    assert found.clipping_factor == pytest.approx(
        np.mean([bound / max(bound, n) for n in norms]), rel=1e-12
    )
    assert 0 < found.clipping_factor < 1
    assert torch.equal(updates, before)


def test_angles_are_those_of_geometry() -> None:
    updates = torch.tensor(
        [[2.0, 0.0], [0.0, 5.0], [-1e20, 0.0], [1e-20, 1e-20], [0.0, 0.0], [-1.0, 1.0]]
    )
    found = measure_updates(updates, 1.0, torch.tensor([3.0, 0.0])).angles
    expected = [0, 90, 180, 45, math.nan, 135]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("last", [None, torch.zeros(2)])
def test_no_angle_without_a_last_update(last: torch.Tensor | None) -> None:
    assert measure_updates(torch.ones(3, 2), 1.0, last).angles.isnan().all()


def test_the_clipping_factor_is_the_mean_of_the_updates_own() -> None:
    updates = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0], [0.0, 4.996]])  # 5, 10, 1, 4.996
    found = measure_updates(updates, 1.0, bound=5.0)
    assert found.clipping_factor == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert found.share_at_bound == pytest.approx(3 / 4)
    assert measure_updates(updates, 1.0, bound=20.0).clipping_factor == 1.0
    unbounded = measure_updates(updates, 1.0)
    assert (unbounded.clipping_factor, unbounded.share_at_bound) == (1.0, 0.0)


def test_equal_updates_do_not_vary_and_zero_ones_have_no_variation() -> None:
    assert measure_updates(torch.ones(5, 4), 1.0).variation == pytest.approx(0, abs=1e-12)
    assert math.isnan(measure_updates(torch.zeros(5, 4), 1.0).variation)
    assert measure_updates(torch.ones(1, 4), 1.0).variation == 0.0


def test_an_update_of_1e30_spoils_no_other_s_measures() -> None:
    updates = torch.tensor([[1e30, -1e30], [1.0, 1.0]])
    found = measure_updates(updates, 0.1, torch.tensor([1e30, 1e30]), 2.0)
    assert found.norms.tolist() == pytest.approx([math.sqrt(2) * 1e30, math.sqrt(2)], rel=1e-6)
    assert found.angles.tolist() == pytest.approx([90.0, 0.0], abs=1e-5)
    assert found.clipping_factor == pytest.approx(0.5)


@pytest.mark.parametrize("updates", [torch.ones(3), torch.ones(0, 3)])
def test_updates_that_are_no_matrix_are_refused(updates: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"shape \[K, d\]"):
        measure_updates(updates, 1.0)


# The tail index.


def noise(law: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    draw = {"gaussian": generator.standard_normal, "cauchy": generator.standard_cauchy}[law]
    return torch.from_numpy(draw(shape))


@pytest.mark.parametrize(("law", "alpha"), [("gaussian", 2.0), ("cauchy", 1.0)])
@pytest.mark.parametrize("dimension", [3, 5000])
def test_the_tail_index_of_many_clients_is_the_law_s(
    law: str, alpha: float, dimension: int
) -> None:
    updates = noise(law, (2000, dimension), 2) + 50.0
    found = 1 / inverse_noise_index(updates, np.random.default_rng(3))
    assert found == pytest.approx(alpha, abs=0.12)


def test_neighbours_that_are_alike_are_parted() -> None:
    """Clients of like data follow each other in some partitions: their sums would look like 1."""
    updates = noise("gaussian", (400, 6), 4).repeat_interleave(5, dim=0)
    assert tail_index(updates, 5) == pytest.approx(1.0, abs=0.1)
    found = 1 / inverse_noise_index(updates, np.random.default_rng(5))
    assert found == pytest.approx(2.0, abs=0.2)


def test_no_tail_index_from_few_or_useless_updates() -> None:
    enough = noise("gaussian", (TAIL_LEAST_CLIENTS, 4), 6)
    generator = np.random.default_rng(7)
    assert math.isfinite(inverse_noise_index(enough, generator))
    assert math.isnan(inverse_noise_index(enough[1:], generator))
    assert math.isnan(inverse_noise_index(torch.ones(40, 4), generator))
    enough[3, 2] = math.inf
    assert math.isnan(inverse_noise_index(enough, generator))


def test_pooled_indices_are_weighted_by_clients() -> None:
    pooled = pooled_tail_index([(0.5, 20), (math.nan, 7), (1.0, 60)])
    assert pooled == pytest.approx(1 / (0.25 * 0.5 + 0.75 * 1.0))
    assert pooled_tail_index([(-0.2, 20), (0.1, 20)]) == math.inf
    assert math.isnan(pooled_tail_index([(math.nan, 5)]))
    assert math.isnan(pooled_tail_index([]))


@pytest.mark.parametrize(("law", "alpha"), [("gaussian", 2.0), ("cauchy", 1.0)])
def test_pooling_sees_the_law_through_rounds_of_different_size_and_place(
    law: str, alpha: float
) -> None:
    """Single rounds of 40 are rough; stacked as they are, their sizes alone would look fat."""
    generator = np.random.default_rng(8)
    rounds = [
        noise(law, (40, 2), 100 + t) * 10.0 ** generator.uniform(-3, 3) + generator.normal(0, 99)
        for t in range(100)
    ]
    pooled = pooled_tail_index((inverse_noise_index(u, generator), len(u)) for u in rounds)
    assert pooled == pytest.approx(alpha, abs=0.25)
    if law == "gaussian":
        centred = torch.cat([u - u.median(dim=0).values for u in rounds])
        shuffled = centred[torch.from_numpy(generator.permutation(len(centred)))]
        assert tail_index(shuffled, 5) < 1.6


# In the files of a run.


def report(server_round: int, **fields: Any) -> RoundReport:
    updates = fields.get("updates")
    clients = [] if updates is None else [7 * i + 1 for i in range(len(updates))]
    defaults = {"invited": clients, "accepted": clients, "rejected": [], "local_lr": 0.5}
    return RoundReport(server_round, model=torch.zeros(2), **{**defaults, **fields})


def test_a_runs_lines_hold_what_its_reports_say(tmp_path: Path) -> None:
    reports: list[RoundReport] = []
    entries = run(
        tmp_path,
        [reports.append],
        report=True,
        algorithm="fat-clipping-pr",
        clip_norm=3.0,
        num_clients=22,
        num_server_rounds=3,
        attack="reverse-scaled-average",
        num_byzantine=2,
        local_lr_decay=0.5,
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert "instruments" not in json.loads(lines[0])
    last = None
    for entry, seen in zip(entries, reports[1:], strict=True):
        measured = entry["instruments"]
        assert seen.updates is not None
        u = seen.updates.double().numpy()
        norms = dict(enumerate(np.linalg.norm(u, axis=1)))
        assert measured["norm_gradient"] == {
            str(i): pytest.approx(norms[i], rel=1e-5) for i in range(22)
        }
        assert measured["norm_parameter"] == {
            str(i): pytest.approx(norms[i] * entry["local_lr"], rel=1e-5) for i in range(22)
        }
        assert measured["angle_degrees"] == {
            str(i): None if last is None else pytest.approx(naive_angle(u[i], last), rel=1e-5)
            for i in range(22)
        }
        # The honest have clipped already, and tell what their norm was.
        told = seen.claimed_norms
        assert set(told) == set(range(22))
        assert measured["norm_gradient_before_clipping"] == {
            str(i): pytest.approx(told[i], rel=1e-5) for i in range(22)
        }
        factors = [3.0 / max(3.0, norms[i], told[i]) for i in range(22)]
        assert measured["mean_clipping_factor"] == pytest.approx(np.mean(factors), rel=1e-5)
        assert measured["mean_clipping_factor"] < 20 / 22
        assert measured["bound_gradient"] == 3.0
        assert measured["bound_parameter"] == pytest.approx(3.0 * entry["local_lr"], rel=1e-5)
        assert measured["tail_index"] > 0
        # The last global update is the mean of the *bounded* updates.
        clipped = np.array([row * min(1, 3.0 / norms[i]) for i, row in enumerate(u)])
        last = clipped.mean(axis=0)
    inverse = [1 / entry["instruments"]["tail_index"] for entry in entries]
    window = [entry["instruments"]["tail_index_window"] for entry in entries]
    expected = [1 / np.mean(inverse[: t + 1]) for t in range(3)]
    assert window == [pytest.approx(value, rel=1e-4) for value in expected]
    others = ["accuracy.png", "loss.png", "clients.png", "phases.png"]
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {*PLOTS, *others}
    for name in PLOTS:
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    assert summary_of(tmp_path)["catastrophic_failure"] is None


def test_few_clients_have_no_tail_index_and_no_plot_of_it(tmp_path: Path) -> None:
    entries = run(tmp_path, num_server_rounds=2, report=True)
    assert [entry["instruments"]["tail_index"] for entry in entries] == [None, None]
    assert entries[0]["instruments"]["bound_gradient"] is None
    assert not (tmp_path / "plots" / "tail-index.png").exists()
    assert (tmp_path / "plots" / "update-norms.png").exists()


def test_instruments_can_be_left_out(tmp_path: Path) -> None:
    entries = run(tmp_path, num_server_rounds=2, instruments=False, report=True)
    assert all("instruments" not in entry for entry in entries)
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"accuracy.png", "loss.png", "clients.png", "phases.png"}
    assert "catastrophic_failure" in summary_of(tmp_path)


def test_instruments_never_change_the_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 8, "num_clients": 20, "server_momentum": 0.9}
    run(tmp_path / "with", **options)
    run(tmp_path / "without", **options, instruments=False)
    final = [tmp_path / name / "checkpoints/final.safetensors" for name in ("with", "without")]
    assert final[0].read_bytes() == final[1].read_bytes()


def test_a_skipped_round_is_measured_and_keeps_the_last_update() -> None:
    instruments = Instruments(True, 10, 0)
    along, across = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    instruments.of_round(report(1, updates=along[None], aggregate=along))
    skipped = instruments.of_round(report(2, updates=across[None], skipped="too few"))
    after = instruments.of_round(report(3, updates=across[None], aggregate=across))
    later = instruments.of_round(report(4, updates=across[None], aggregate=across))
    angles = [fields["instruments"]["angle_degrees"]["1"] for fields in (skipped, after, later)]
    assert angles == [pytest.approx(90), pytest.approx(90), pytest.approx(0, abs=1e-5)]
    assert instruments.of_round(report(5)) == {}


def test_the_window_forgets_rounds_before_it() -> None:
    instruments = Instruments(True, 10, 0)
    fat = [noise("cauchy", (200, 3), seed) for seed in range(10)]
    thin = [noise("gaussian", (200, 3), seed) for seed in range(10)]
    window = [
        instruments.of_round(report(t, updates=updates))["instruments"]["tail_index_window"]
        for t, updates in enumerate([*fat, *thin], start=1)
    ]
    assert window[9] == pytest.approx(1.0, abs=0.15)
    assert window[19] == pytest.approx(2.0, abs=0.2)
    assert window[9] < window[14] < window[19]


def test_the_failure_is_in_the_lines_and_in_the_summary(tmp_path: Path) -> None:
    config = RunConfig()
    folder = RunFolder(tmp_path, config, Instruments(True, 10, 0))
    for t, accuracy in enumerate([0.1, 0.6, 0.9, 0.12, 0.9]):
        folder(report(t, metrics={"accuracy": accuracy, "loss": 1.0}, evaluated_by="server"))
    assert folder.finish("completed")["catastrophic_failure"] == 3
    assert summary_of(tmp_path)["catastrophic_failure"] == 3
    named = [entry.get("catastrophic_failure") for entry in read_metrics(tmp_path)]
    assert named == [None, None, None, 3, 3]
    (tmp_path / "summary.json").unlink()
    write_failure(tmp_path, config, "the server is gone")
    assert summary_of(tmp_path)["catastrophic_failure"] == 3


def test_clients_cannot_name_a_metric_like_an_instrument(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RunConfig(), Instruments(False, 10, 0))
    lies = {"instruments": 1.0, "catastrophic_failure": 2.0, "loss": 1.0}
    folder(report(1, metrics=lies, evaluated_by="clients"))
    folder.finish("completed")
    entry = read_metrics(tmp_path)[0]
    assert entry["loss"] == 1.0
    assert "instruments" not in entry
    assert "catastrophic_failure" not in entry


def test_lines_are_json_whatever_the_updates_hold(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RunConfig(), Instruments(True, 0, 0))
    for t, value in enumerate([0.0, 3e38, 1e-38, math.inf, math.nan], start=1):
        updates = torch.full((25, 4), value)
        folder(report(t, updates=updates, aggregate=updates[0], norm_bound=1.0))
    folder.finish("completed")
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    drawn = [path.name for path in draw_plots(read_record(tmp_path))]
    assert [name for name in drawn if name in PLOTS] == PLOTS[:3]


def test_without_rounds_nothing_is_plotted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert draw_plots(read_record(tmp_path)) == []


def test_the_clipping_factor_counts_what_clients_clipped_themselves() -> None:
    arrived = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.6, 0.8], [30.0, 40.0]])  # 5, 5, 1 and 50
    claimed = torch.tensor([20.0, float("nan"), 1.0, 2.0], dtype=torch.float64)
    found = measure_updates(arrived, 1.0, bound=5.0, claimed_norms=claimed)
    # A claim below what arrived (the last one's) is a lie that does not count.
    assert found.clipping_factor == pytest.approx((5 / 20 + 1 + 1 + 5 / 50) / 4)
    assert found.norms.tolist() == pytest.approx([5, 5, 1, 50])


@pytest.mark.parametrize("algorithm", ["fat-clipping-pr", "ce-fedavg"])
def test_honest_clients_tell_their_norm_before_clipping(
    repository: Path, tmp_path: Path, algorithm: str
) -> None:
    """The first round's updates do not depend on the threshold: an unclipped run has the norms."""
    first = {}
    for name, extra in (
        ("clipped", {"algorithm": algorithm, "clip-norm": 0.05, "clip-units": "gradient"}),
        ("unclipped", {"algorithm": "gfedavg"}),
    ):
        options = {
            "aggregator": "mean",
            "attack": "none",
            "num-byzantine": 0,
            "num-clients": 5,
            "num-server-rounds": 1,
            "instruments": True,
            "output-dir": str(tmp_path / name),
            **extra,
        }
        config = recipe_config(repository / "recipes" / "demo.toml", (), options)
        simulate(config, Console(quiet=True))
        first[name] = read_metrics(tmp_path / name)[1]["instruments"]
    norms = first["unclipped"]["norm_gradient"]
    told = first["clipped"]["norm_gradient_before_clipping"]
    assert told == pytest.approx(norms, rel=1e-5)
    factors = [0.05 / max(0.05, norm) for norm in norms.values()]
    assert first["clipped"]["mean_clipping_factor"] == pytest.approx(np.mean(factors), rel=1e-4)
    assert first["clipped"]["mean_clipping_factor"] < 0.5
    assert "norm_gradient_before_clipping" not in first["unclipped"]
