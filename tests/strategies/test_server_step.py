"""The server step, against recursions written out in exact numbers."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from blackthorn.strategies import ServerStep

INITIAL = torch.tensor([1.0, -2.0, 0.5])
AGGREGATES = [torch.tensor([2.0, 0.0, -1.0]), torch.tensor([-1.0, 3.0, 0.5]), torch.ones(3)]


def walk(step: ServerStep, local_lrs: list[float]) -> list[torch.Tensor]:
    model, velocity, models = INITIAL, None, []
    for aggregate, local_lr in zip(AGGREGATES, local_lrs, strict=True):
        velocity = step.velocity(velocity, aggregate)
        model = step.apply(model, velocity, local_lr, INITIAL)
        models.append(model)
    return models


def test_both_rates_multiply_the_aggregate() -> None:
    models = walk(ServerStep(server_lr=2.0), [0.5, 0.25, 0.125])
    # 1 - 2·0.5·2 = -1, then -1 + 2·0.25·1 = -0.5, then -0.5 - 0.25 = -0.75
    assert [float(m[0]) for m in models] == [-1.0, -0.5, -0.75]
    assert models[-1].tolist() == [-0.75, -3.75, 1.0]


def test_momentum_remembers_every_aggregate_in_gradient_units() -> None:
    models = walk(ServerStep(momentum=0.5), [1.0, 0.5, 1.0])
    a, b, c = (x.numpy() for x in AGGREGATES)
    expected = INITIAL.numpy() - a - 0.5 * (0.5 * a + b) - (0.25 * a + 0.5 * b + c)
    np.testing.assert_allclose(models[-1].numpy(), expected, rtol=1e-6)


def test_projection_keeps_the_model_in_the_ball_around_the_initial_one() -> None:
    models = walk(ServerStep(projection_radius=1.5), [1.0, 1.0, 1.0])
    w = centre = INITIAL.numpy().astype(np.float64)
    for aggregate, model in zip(AGGREGATES, models, strict=True):
        w = w - aggregate.numpy()
        distance = np.linalg.norm(w - centre)
        if distance > 1.5:
            w = centre + 1.5 / distance * (w - centre)
        np.testing.assert_allclose(model.numpy(), w, rtol=1e-6)
    assert np.linalg.norm(models[0].numpy() - centre) == pytest.approx(1.5)


def test_projection_leaves_a_model_inside_to_the_last_bit() -> None:
    free, held = walk(ServerStep(), [0.1] * 3), walk(ServerStep(projection_radius=50.0), [0.1] * 3)
    for one, other in zip(free, held, strict=True):
        assert torch.equal(one, other)


def test_projection_measures_in_float64() -> None:
    # The square of 1e25 is beyond float32.
    step = ServerStep(projection_radius=2.0)
    moved = step.apply(torch.zeros(2), torch.tensor([-3e25, -4e25]), 1.0, torch.zeros(2))
    np.testing.assert_allclose(moved.numpy(), [1.2, 1.6], rtol=1e-6)


def test_nothing_is_changed_in_place() -> None:
    velocity, model = torch.ones(3), torch.ones(3)
    step = ServerStep(momentum=0.5, projection_radius=0.5)
    new = step.velocity(velocity, AGGREGATES[0])
    step.apply(model, new, 1.0, INITIAL)
    assert torch.equal(velocity, torch.ones(3))
    assert torch.equal(model, torch.ones(3))
    assert AGGREGATES[0].tolist() == [2.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": 0.0}, "server_lr = 0.0"),
        ({"server_lr": math.inf}, "server_lr = inf"),
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"momentum": -0.1}, "momentum = -0.1"),
        ({"projection_radius": 0.0}, "projection_radius = 0.0"),
        ({"projection_radius": math.nan}, "projection_radius = nan"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerStep(**options)
