"""Noise in which nobody is hidden: no figure, and so no claim."""

from pathlib import Path
from typing import Any

import pytest
from digits_runs import configuration
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError
from blackthorn.strategies import ClipNorm, Ledger, PrivacyPlan

DP: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "num_server_rounds": 2,
    "instruments": False,
}
DP_SGD: dict[str, Any] = {
    "algorithm": "gfedavg",
    "instruments": False,
    "local_dp_sgd": True,
    "dp_sgd_sample_rate": 0.2,
    "batch_size": 10,
}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({**DP, "noise_multiplier": 0.02}, "noise-multiplier = 0.02"),
        ({**DP, "noise_multiplier": 5e-324}, "noise-multiplier = 4.94066e-324"),
        (
            {
                **DP,
                "noise_multiplier": 0.02,
                "participation": "fixed",
                "clients_per_round": 2,
                "neighbours": "replace-one",
            },
            "noise-multiplier = 0.02",
        ),
        ({**DP_SGD, "dp_sgd_noise_multiplier": 0.02}, "dp-sgd-noise-multiplier = 0.02"),
    ],
)
def test_noise_without_a_finite_epsilon_is_refused_under_a_claim(
    tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key} breaks the claim: .*no finite epsilon") as caught:
        simulate(configuration(tmp_path / "run", **options), Console(quiet=True))
    assert "\n" not in str(caught.value)
    assert "claim-privacy = false" in str(caught.value)
    assert not (tmp_path / "run").exists()
    prepare(configuration(tmp_path / "run", **options, claim_privacy=False))


def test_what_an_earlier_run_spent_without_end_is_no_claim(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    plan = PrivacyPlan(ClipNorm(1.0), 0.02, 4, 1)
    ledger = Ledger(plan, path)
    ledger.charge(plan.release())
    ledger.close()
    config = configuration(tmp_path / "run", **DP, ledger=str(path))
    privacy = simulate(config, Console(quiet=True))["privacy"]
    assert privacy["epsilon"] is None
    assert privacy["claim"].startswith("none, as no finite epsilon holds: client-level")


def test_a_share_that_hides_nobody_from_the_server_is_no_claim_against_it(tmp_path: Path) -> None:
    """The sum's noise is enough; the server sees the parts, of 0.1 / (2 sqrt 4) = 0.025."""
    options = {**DP, "noise_multiplier": 0.1, "noise_location": "client"}
    privacy = simulate(configuration(tmp_path, **options), Console(quiet=True))["privacy"]
    assert privacy["epsilon"] > 0
    assert privacy["claim"].startswith("client-level")
    assert privacy["local"]["epsilon"] is None
    assert privacy["local"]["claim"].startswith("none, as no finite epsilon holds: what a client")
