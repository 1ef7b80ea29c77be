"""A client's operator decides what it sends: a server that deviates gets a refusal, and no more."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from markdown_blocks import blocks_of
from policy_client import AT_CLIENTS, DP_SGD, Client, enrolment, run_config

from blackthorn.client_app import clientapp as client_app
from blackthorn.client_app.client_ledger import Sent
from blackthorn.client_app.policy import Policy, read_policy
from blackthorn.settings.config import ConfigError, kebab

# What a policy allows.


@pytest.mark.parametrize(
    ("policy", "values", "asked", "told", "in_full"),
    [
        (
            "min-noise-multiplier = 2.0",
            AT_CLIENTS,
            {"z": 1e-9},
            "noise-multiplier = 1e-09 is below the client's min-noise-multiplier",
            "noise-multiplier = 1e-09 is not allowed: at least 2",
        ),
        (
            "min-noise-multiplier = 2.0",
            {**AT_CLIENTS, "noise-location": "server"},
            {},
            "noise-multiplier = 0 is below the client's min-noise-multiplier",
            "at least 2",
        ),
        (
            "max-cohort = 3",
            AT_CLIENTS,
            {},
            "4 clients share the noise, more than the client's max-cohort",
            "a cohort of 4 clients is not allowed: at most 3",
        ),
        (
            "max-local-epsilon = 3.0",
            AT_CLIENTS,
            {"z": 1e-9},
            "the round would pass the client's max-local-epsilon",
            "max-local-epsilon is 3",
        ),
        (
            "max-local-epsilon = 1000.0",
            {**AT_CLIENTS, "noise-location": "server"},
            {},
            "the round would pass the client's max-local-epsilon",
            "would make epsilon inf",
        ),
        (
            "max-sample-epsilon = 0.001",
            DP_SGD,
            {},
            "the round would pass the client's max-sample-epsilon",
            "max-sample-epsilon is 0.001",
        ),
        (
            "min-dp-sgd-noise-multiplier = 2.1",
            DP_SGD,
            {},
            "dp-sgd-noise-multiplier = 2 is below the client's min-dp-sgd-noise-multiplier",
            "at least 2.1",
        ),
    ],
)
def test_a_round_that_asks_for_too_much_is_refused_before_training(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    values: dict[str, Any],
    asked: dict[str, Any],
    told: str,
    in_full: str,
) -> None:
    monkeypatch.setattr(client_app, "_node", lambda _: pytest.fail("the client looked at its data"))
    client = Client(tmp_path, policy)
    assert told in client.refusal(run_config(values), 1, **asked)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.getMessage().startswith("client 3 does not train in run 1: ")
    assert in_full in record.getMessage()


@pytest.mark.parametrize("rate", [5e-324, 1e-39, 0.0, -0.1, math.nan, math.inf, 1e39])
@pytest.mark.parametrize("values", [{**AT_CLIENTS, "dtype": "float64"}, DP_SGD])
def test_a_rate_at_which_no_noise_has_its_size_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], rate: float
) -> None:
    """5e-324 times any deviation below a half is 0: the reply would show the update as it is."""
    monkeypatch.setattr(client_app, "_node", lambda _: pytest.fail("the client looked at its data"))
    client = Client(tmp_path, "max-rounds = 3")
    told = client.refusal(run_config(values), 1, local_lr=rate)
    assert f"the server's local-lr = {rate:g} is not allowed" in told


@pytest.mark.parametrize("values", [AT_CLIENTS, DP_SGD])
def test_a_rate_is_checked_without_a_policy_too(tmp_path: Path, values: dict[str, Any]) -> None:
    told = Client(tmp_path, ledger=False).refusal(run_config(values), 1, local_lr=5e-324)
    assert "the server's local-lr = 4.94066e-324 is not allowed" in told


@pytest.mark.parametrize(("bound", "rate"), [(1e-20, 1e-20), (1e12, 1e30)])
def test_a_bound_is_checked_at_the_round_s_rate(tmp_path: Path, bound: float, rate: float) -> None:
    config = run_config(AT_CLIENTS, clip_norm=bound, local_lr=1.0)
    told = Client(tmp_path, "max-rounds = 3").refusal(config, 1, local_lr=rate)
    assert f"the server's bound x local-lr = {bound * rate:g} is not allowed" in told


@pytest.mark.parametrize("z", [1e-39, 1e45])
def test_noise_beyond_float32_is_refused(tmp_path: Path, z: float) -> None:
    told = Client(tmp_path, "max-rounds = 3").refusal(run_config(AT_CLIENTS), 1, z=z)
    assert "the noise that the server asks for = " in told


@pytest.mark.parametrize(
    ("policy", "values", "told"),
    [
        ('algorithms = ["fa-ld"]', AT_CLIENTS, "algorithm = dp-fedavg is not among the client's"),
        (
            "max-local-epsilon = 1e6",
            {**AT_CLIENTS, "claim-privacy": False},
            "max-local-epsilon asks for a claim of client-level privacy",
        ),
        ("max-local-epsilon = 1e6", DP_SGD, "asks for a claim of client-level privacy"),
        (
            "max-local-epsilon = 1e6",
            {**AT_CLIENTS, "insecure-seeded-noise": True},
            "asks for a claim of client-level privacy",
        ),
        (
            "max-sample-epsilon = 1e6",
            {**DP_SGD, "insecure-seeded-noise": True},
            "asks for a claim of privacy",
        ),
        (
            "max-sample-epsilon = 1e6",
            {**DP_SGD, "local-dp-sgd": False},
            "asks for a claim of privacy",
        ),
        ("max-rounds = 9", {**AT_CLIENTS, "model": "/tmp/x.py:net"}, "runs no code of the server"),
    ],
)
def test_a_run_of_which_no_round_is_allowed_is_refused_at_the_enrolment(
    tmp_path: Path, policy: str, values: dict[str, Any], told: str
) -> None:
    client, config = Client(tmp_path, policy), run_config(values)
    assert told in enrolment(client, config)
    for kind in ("evaluate", "train"):
        message = Message(RecordDict({"config": ConfigRecord({"server-round": 1})}), 5, kind)
        message.content["arrays"] = ArrayRecord()
        with pytest.raises(ValueError, match=told.replace("(", r"\(")):
            client.send(config, message)
    assert client.sent() == Sent()


def test_noise_that_a_seed_gives_away_counts_for_nothing(tmp_path: Path) -> None:
    for policy, values in (
        ("min-noise-multiplier = 1.0", AT_CLIENTS),
        ("min-dp-sgd-noise-multiplier = 1.0", DP_SGD),
    ):
        client = Client(tmp_path, policy)
        assert client.train(run_config(values), 1).has_content()
        told = client.refusal(run_config(values, insecure_seeded_noise=True), 2)
        assert "of noise that a seed gives away, is below" in told
        client.ledger.unlink()


# The file.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no rule and would allow everything"),
        ("delta = 1e-6", "it has no rule and would allow everything"),
        ("repeated-rounds = true", "it has no rule and would allow everything"),
        ("max-rounds = 1\nrepeated-rounds = 1", "repeated-rounds = 1 is not allowed"),
        ("max-round = 3", "unknown key max-round; did you mean max-rounds?"),
        ("max-rounds = 0", "max-rounds = 0 is not allowed: should be greater than or equal to 1"),
        ("max-rounds = 2.5", "max-rounds = 2.5 is not allowed"),
        ('max-rounds = "3"', "max-rounds = '3' is not allowed: should be a valid integer"),
        ("max-local-epsilon = nan", "max-local-epsilon = nan is not allowed"),
        ("max-local-epsilon = inf", "max-local-epsilon = inf is not allowed"),
        ("max-sample-epsilon = -1", "max-sample-epsilon = -1 is not allowed"),
        ("min-noise-multiplier = true", "min-noise-multiplier = True is not allowed"),
        ('algorithms = "rage"', "algorithms = 'rage' is not allowed: should be a valid list"),
        ('algorithms = ["fedsgd"]', "algorithms = 'fedsgd' is not allowed: should be 'gfedavg'"),
        ("max-rounds = 3\ndelta = 1", "delta = 1 is not allowed"),
        ('input-shape = "64"\nnum-classes = 10', "it has no rule and would allow everything"),
        ("max-rounds = 3\nnum-classes = 10", "input-shape and num-classes go together"),
        ('max-rounds = 3\ninput-shape = "8x8"', "input-shape is '8x8': allowed are positive"),
        ('max-rounds = 3\ninput-shape = "64"\nnum-classes = 1', "num-classes = 1 is not allowed"),
        ("max-rounds = = 3", "is not valid TOML"),
    ],
)
def test_a_wrong_policy_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_policy(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"policy {path}")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policy(tmp_path / "none.toml")


# The guide.


def test_the_policy_in_the_guide_is_one_and_its_table_is_whole(
    repository: Path, tmp_path: Path
) -> None:
    page = repository / "docs" / "privacy.md"
    (policy,) = [b.text for b in blocks_of(page, page.name) if b.text.startswith("# policy.toml")]
    client = Client(tmp_path, policy)
    assert client.train(run_config(DP_SGD), 1).has_content()
    for changes in ({"dp_sgd_noise_multiplier": 0.7}, {"local_dp_sgd": False}):
        assert "the client's m" in client.refusal(run_config(DP_SGD, **changes), 2)
    table = page.read_text().partition("| rule | what is refused")[2].partition("\n\n")[0]
    named = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(named) == sorted(kebab(name) for name in Policy.model_fields)
