"""What a private run may be."""

import re
from pathlib import Path
from typing import Any

import pytest

from blackthorn.recording.privacy import privacy_plan
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.settings.privacy_checks import claims_privacy
from blackthorn.strategies.accounting import Release

DP: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "clip-norm": 1.0,
    "noise-multiplier": 2.0,
    "participation": "poisson",
    "sample-rate": 0.5,
}
TURNS: dict[str, Any] = {"participation": "rotating", "sample-rate": 1.0, "bands": 5}


@pytest.mark.parametrize(
    ("values", "part", "instead"),
    [
        ({"aggregator": "rage"}, "aggregator = rage", "set aggregator = mean"),
        ({"weighting": "num-examples"}, "weighting = num-examples", "set weighting = uniform"),
        ({"delta": 0.11}, "delta = 0.11", "set delta = 0.1"),
        ({"denominator": "replies"}, "denominator = replies", "set denominator = fixed"),
        ({"instruments": True}, "instruments = true", "set instruments = false"),
        ({"min-replies": 2}, "min-replies = 2", "set min-replies = 1"),
        (
            {"noise-location": "client", "noise-top-up": False},
            "noise-top-up = false",
            "set noise-top-up = true",
        ),
        (
            {"noise-location": "client", "num-byzantine": 1, "attack": "all-ones"},
            "num-byzantine = 1",
            "set noise-location = server",
        ),
        (
            {"num-byzantine": 2, "attack": "mimic"},
            "collusion = true",
            "set collusion = false",
        ),
        (
            {"omniscient": True, "num-byzantine": 1, "attack": "baruch"},
            "omniscient = true",
            "set omniscient = false",
        ),
    ],
)
def test_what_breaks_the_claim_is_refused_in_one_line(
    values: dict[str, Any], part: str, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({**DP, **values})
    line = str(caught.value)
    assert line.startswith(f"{part} breaks the claim")
    assert instead in line
    assert "claim-privacy = false" in line
    assert "\n" not in line
    free = make_config({**DP, **values, "claim-privacy": False})
    assert not claims_privacy(free)


def test_a_delta_of_one_in_the_clients_is_the_largest() -> None:
    assert claims_privacy(make_config({**DP, "delta": 0.1}))
    # What it would cover is one client in ten, in full.
    with pytest.raises(ConfigError, match=r"above 1/num-clients = 0\.1 it covers a server that"):
        make_config({**DP, "delta": 0.1000001})


def test_a_delta_of_one_in_a_clients_examples_is_the_largest_for_them() -> None:
    values: dict[str, Any] = {
        "local-dp-sgd": True,
        "dp-sgd-sample-rate": 0.25,
        "batch-size": 5,
        "delta": 0.05,
    }
    make_config(values)
    with pytest.raises(ConfigError, match="breaks the claim of local-dp-sgd") as found:
        make_config({**values, "delta": 0.06})
    assert "\n" not in str(found.value)
    make_config({**values, "delta": 0.06, "claim-privacy": False})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"clip-norm": 5e-324}, "clip-norm = 5e-324"),
        ({"clip-norm": 1e-300, "local-lr": 1e-30}, "clip-norm = 1e-300 with local-lr = 1e-30"),
        ({"clip-norm": 1e-20, "local-lr": 1e-20}, "the threshold in parameter units is 1e-40"),
        (
            {"clip-norm": 1e10, "local-lr": 1e-35, "clip-units": "parameter"},
            "the threshold in gradient units is 1e\\+45",
        ),
        (
            {"clip-norm": 1e-20, "local-lr": 1e20, "clip-units": "parameter"},
            "the threshold in gradient units is 1e-40",
        ),
        (
            {"clip-norm": 1e-30, "local-lr-decay": 0.5, "num-server-rounds": 40},
            "at the rate 1.81899e-13 the threshold in parameter units",
        ),
        (
            {"local-lr-decay": 1e-20, "num-server-rounds": 3},
            "the last round's rate is 1e-41",
        ),
        ({"local-lr": 1e-39}, "the rate is 1e-39"),
    ],
)
@pytest.mark.parametrize("algorithm", ["dp-normfedavg", "fat-clipping-pr", "ce-fedavg"])
def test_a_threshold_or_rate_beyond_float32_is_one_line(
    values: dict[str, Any], said: str, algorithm: str
) -> None:
    noise = {"noise-multiplier": 1.0} if algorithm == "dp-normfedavg" else {}
    base = {"algorithm": algorithm, "clip-norm": 1.0, "clip-units": "gradient", **noise}
    with pytest.raises(ConfigError, match=said) as found:
        make_config({**base, **values})
    assert "is not allowed: 1.2e-38 to 3e+38" in str(found.value)
    assert "\n" not in str(found.value)


# Under these nothing is charged, so that neither a ledger nor a budget may be named.
NOTHING_CHARGED: list[tuple[dict[str, Any], str]] = [
    ({"claim-privacy": False}, "claim-privacy = false"),
    ({"insecure-seeded-noise": True}, "insecure-seeded-noise = true"),
    ({"noise-location": "client", "aggregator": "rage"}, "a robust aggregator"),
]

NOTHING_NOISED = {"algorithm": "gfedavg", "clip-norm": 0.0, "noise-multiplier": 0.0}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"noise-multiplier": 0.0}, "set one of the two above 0"),
        ({"epsilon": 5.0}, "set one of the two above 0"),
        ({"clip-norm": 0.0}, "clip-norm = 0.0"),
        ({"neighbours": "zero-out"}, "set neighbours = add-remove"),
        (
            {
                "participation": "fixed",
                "sample-rate": 1.0,
                "clients-per-round": 5,
                "neighbours": "add-remove",
            },
            "set neighbours = zero-out or replace-one",
        ),
        ({"algorithm": "gfedavg", "clip-norm": 0.0}, "noise-multiplier = 2.0 is not allowed"),
        ({"algorithm": "fat-clipping-pr"}, "noise-multiplier = 2.0 is not allowed"),
        ({**TURNS, "noise-location": "client"}, "noise-location = client is not allowed with part"),
        ({**TURNS, "bands": 1}, "bands = 1 is not allowed with participation rotating"),
        ({**TURNS, "bands": 11}, "bands = 11 is not allowed with participation rotating"),
        ({**TURNS, **NOTHING_NOISED}, "participation = rotating is not allowed without noise"),
        ({"clip-quantile": 0.5, "noise-location": "client"}, "clip-quantile = 0.5 is not allowed"),
        ({"clip-quantile": 0.5, "algorithm": "dp-normfedavg"}, "ce-fedavg, dp-fedavg take it"),
        ({"clip-quantile": 0.5, **NOTHING_NOISED}, "clip-quantile = 0.5 is not allowed with algo"),
        ({"delta": 0.0}, "delta = 0.0"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"accountant": "moments"}, "accountant = 'moments'"),
        *(
            ({**unclaimed, key: value}, f"{key} = {value} is not allowed with {why}")
            for unclaimed, why in NOTHING_CHARGED
            for key, value in (("ledger", "spent.json"), ("max-epsilon", 1.0))
        ),
        (
            {"noise-location": "client", "aggregator": "rage", "noise-multiplier": 0.0}
            | {"epsilon": 8.0},
            "epsilon = 8.0 is not allowed with a robust aggregator",
        ),
        ({**NOTHING_NOISED, "ledger": "spent.json"}, "ledger = spent.json is not allowed with alg"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({**DP, **values})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_seed_for_the_noise_drops_the_claim() -> None:
    assert claims_privacy(make_config(DP))
    assert not claims_privacy(make_config({**DP, "insecure-seeded-noise": True}))
    assert not claims_privacy(make_config({"algorithm": "ce-fedavg", "clip-norm": 1.0}))
    assert claims_privacy(make_config({**DP, "algorithm": "ce-fedavg"}))


@pytest.mark.parametrize(
    ("values", "release"),
    [
        ({}, Release(2.0, 0.5)),
        (
            {"participation": "fixed", "sample-rate": 1.0, "clients-per-round": 2},
            Release(2.0),
        ),
        (
            {
                "participation": "fixed",
                "sample-rate": 1.0,
                "clients-per-round": 2,
                "neighbours": "replace-one",
            },
            Release(1.0, drawn=(2, 10)),
        ),
        ({"participation": "full", "sample-rate": 1.0}, Release(2.0)),
        (TURNS, Release(2.0, groups=5)),
        ({**TURNS, "neighbours": "replace-one"}, Release(1.0, groups=5)),
    ],
)
def test_the_plan_is_the_configurations(values: dict[str, Any], release: Release) -> None:
    assert privacy_plan(make_config({**DP, **values})).release() == release


def test_the_noise_is_calibrated_to_the_budget(tmp_path: Path) -> None:
    values = {**DP, "noise-multiplier": 0.0, "epsilon": 5.0, "num-server-rounds": 50}
    config = make_config({**values, "sample-rate": 0.2, "output-dir": str(tmp_path / "run")})
    plan = prepare(config).plan
    assert plan is not None
    assert plan.noise_multiplier == pytest.approx(1.664, rel=0.01)
    with pytest.raises(ConfigError, match="epsilon = 1e-09 is not allowed"):
        prepare(make_config({**values, "epsilon": 1e-9, "output-dir": str(tmp_path / "run")}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"noise-multiplier": 1e200}, "noise-multiplier = 1e+200 is not allowed"),
        ({"participation": "poisson", "sample-rate": 1e-300}, "sample-rate = 1e-300 is not"),
        ({"delta": 1e-300}, "delta = 1e-300 is not allowed"),
    ],
)
def test_what_arithmetic_and_noise_cannot_stand_is_refused(
    values: dict[str, Any], said: str
) -> None:
    """Some ended in a traceback, some in a figure that cannot hold."""
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        make_config({**DP, **values})
    assert "\n" not in str(caught.value)
