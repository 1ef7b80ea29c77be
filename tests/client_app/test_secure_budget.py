"""Of a budget the server's z is no word to be taken: it is an adversary of the figure."""

from dataclasses import replace
from typing import Any

import pytest
from flwr.app import ArrayRecord

from blackthorn.client_app.configured_rule import check_rule
from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.messages import RoundRequest
from blackthorn.recording.privacy import privacy_plan
from blackthorn.settings.config import make_config
from blackthorn.strategies.attestation import SentRule

BUDGET: dict[str, Any] = {
    **{"algorithm": "secure-dp-fedavg", "task": "digits", "num-clients": 20, "delta": 1e-4},
    **{"participation": "full", "sample-rate": 1.0, "epsilon": 5.0, "clip-norm": 1.0},
    **{"num-server-rounds": 10, "secure-bits": 24, "statistics": "server"},
}


def test_with_a_budget_a_client_adds_the_noise_that_it_takes_and_no_less() -> None:
    config = make_config(BUDGET)
    z = privacy_plan(config).noise_multiplier
    numbers = {"bound": 1.0, "clients": 20.0, "survivors": 16.0, "threshold": 2 / 3, "bits": 24.0}
    request = RoundRequest(
        server_round=1,
        local_lr=config.local_lr,
        arrays=ArrayRecord(),
        rule=SentRule("secure-update", {**numbers, "multiplier": z}),
        claimed=True,
    )
    for asked in (z, 1.5 * z):
        rule = SentRule("secure-update", {**numbers, "multiplier": asked})
        assert check_rule(config, replace(request, rule=rule)).sent == rule
    for asked in (0.01, z * (1 - 1e-3)):
        rule = SentRule("secure-update", {**numbers, "multiplier": asked})
        with pytest.raises(PublicRefusal, match="cost more than epsilon = 5"):
            check_rule(config, replace(request, rule=rule))
