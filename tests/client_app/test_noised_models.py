"""Noise at the client against a server that chooses the model so as to see through it."""

import math

import pytest
import torch
from flwr.app import ArrayRecord

from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.messages import RoundRequest
from blackthorn.client_app.private_update import noised_models
from blackthorn.settings.config import make_config
from blackthorn.strategies.attestation import (
    SentRule,
)

# A client costs a millisecond. The update that was rounded on its own is C/4 off, 9.5 standard
# errors of the mean of so many; what is asked for is 5.
CLIENTS = 6000
C = 0.1


def sent(start: float, trained: list[float], z: float, dtype: torch.dtype) -> torch.Tensor:
    """What CLIENTS clients send, each with the model `trained` [d], of a model `start` [d]."""
    config = make_config(
        {
            "algorithm": "dp-fedavg",
            "clip-norm": C,
            "noise-multiplier": z,
            "noise-location": "client",
            "num-clients": 1,
            "local-lr": 1.0,
        }
    )
    rule = SentRule("clip-update", {"bound": C, "noise-multiplier": z, "noise-shares": 1})
    request = RoundRequest(server_round=1, local_lr=1.0, arrays=ArrayRecord(), rule=rule)
    models = torch.tensor([trained] * CLIENTS, dtype=dtype)
    origin = torch.full((len(trained),), start, dtype=dtype)
    return noised_models(config, origin, models, [request] * CLIENTS, range(CLIENTS))


@pytest.mark.parametrize(
    ("exponent", "dtype"), [(0, torch.float32), (20, torch.float32), (49, torch.float64)]
)
def test_a_large_model_moves_nothing_by_more_than_c(exponent: int, dtype: torch.dtype) -> None:
    """Numbers of the model's size are 1/16 apart below 2^20 in float32, and below 2^49 in float64:
    rounded on its own, an update of length 0.1 becomes one of 0.125."""
    start = 2.0**exponent
    z = 2.0
    moved = start - sent(start, [start - 3.0], z, dtype).double()
    # Rounding to 1/8 at most adds little to a deviation of z C.
    deviation = math.hypot(z * C, 1 / 8 / math.sqrt(12))
    assert float(moved.mean()) == pytest.approx(C, abs=5 * deviation / math.sqrt(CLIENTS))


def test_no_noise_that_underflows_is_sent() -> None:
    """At the rate 5e-324 a share of 0.47 deviations is 0, and the update stays 5e-324."""
    config = make_config(
        {
            "algorithm": "dp-fedavg",
            "clip-norm": 1.0,
            "noise-multiplier": 1.5,
            "noise-location": "client",
            "num-clients": 10,
        }
    )
    rule = SentRule("clip-update", {"bound": 1.0, "noise-multiplier": 1.5, "noise-shares": 10})
    request = RoundRequest(server_round=1, local_lr=5e-324, arrays=ArrayRecord(), rule=rule)
    start = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(PublicRefusal, match="the noise that the server asks for = 0 is not"):
        noised_models(config, start, start[None] - 5e-324, [request], [0])


@pytest.mark.parametrize("trained", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_sends_noise_alone(trained: float) -> None:
    """That training has overflowed tells of the data, and NaN passes through any noise."""
    z = 1.0
    moved = 1.0 - sent(1.0, [trained, 0.5], z, torch.float64)
    assert torch.isfinite(moved).all()
    assert float(moved.mean()) == pytest.approx(0.0, abs=5 * z * C / math.sqrt(2 * CLIENTS))
    assert float(moved.std()) == pytest.approx(z * C, rel=5 / math.sqrt(4 * CLIENTS))
