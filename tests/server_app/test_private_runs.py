"""What a private run says of itself, and what it keeps to itself."""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from charged_ledgers import read_charges
from digits_runs import configuration, model, private_run
from rich.console import Console

from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.privacy import privacy_of_dead_run
from blackthorn.recording.run_folder import read_metrics, read_summary, write_failure
from blackthorn.settings.config import ConfigError
from blackthorn.strategies import spent
from blackthorn.strategies.accounting import Release


def keys_of(content: Any, path: tuple[str, ...] = ()) -> set[str]:
    """Every key in `content` that names an epsilon, with what it lies in."""
    if not isinstance(content, dict):
        return set()
    own = {".".join((*path, key)) for key in content if "epsilon" in key}
    return own.union(*(keys_of(value, (*path, key)) for key, value in content.items()))


@pytest.mark.parametrize("location", ["server", "client"])
def test_every_figure_that_a_run_leaves_has_a_row_that_says_against_whom(
    location: str, tmp_path: Path
) -> None:
    steps: dict[str, Any] = {"local_dp_sgd": True, "dp_sgd_sample_rate": 0.2, "batch_size": 10}
    private_run(tmp_path, noise_location=location, **steps, clip_norm=10.0)
    found = set()
    for path in tmp_path.rglob("*.json*"):
        text = path.read_text()
        contents = text.splitlines() if path.suffix == ".jsonl" else [text]
        found |= set().union(*(keys_of(json.loads(content)) for content in contents))
    found |= keys_of(tomllib.loads((tmp_path / "config.toml").read_text()))
    assert {"privacy.epsilon", "epsilon_rdp", "sample_epsilon"} <= found
    assert ("privacy.local.epsilon" in found) == (location == "client")
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    table = page.split("## Who may be the adversary")[1].split("\n\n")[1]
    named = {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row)}
    other_names = {"max-epsilon": "max_epsilon", "privacy.max_epsilon": "max_epsilon"}
    assert {other_names.get(key, key) for key in found} <= named


SECRETS = ("invited", "replied", "rejected", "filtered", "over_bound", '"seconds"', "train-loss")


def test_a_private_run_s_folder_has_figure_and_ledger_and_nothing_of_the_cohort(
    tmp_path: Path,
) -> None:
    summary = private_run(tmp_path, num_server_rounds=4)
    privacy = summary["privacy"]
    expected = spent([(Release(2.0, 0.5), 4)], 1e-5)
    assert privacy["epsilon"] == pytest.approx(expected.epsilon)
    assert (privacy["delta"], privacy["accountant"]) == (1e-5, "rdp")
    assert (privacy["noise_multiplier"], privacy["sample_rate"]) == (2.0, 0.5)
    assert "added or removed" in privacy["claim"]
    assert "local" not in privacy
    assert summary["clients"] is None
    assert read_charges(tmp_path / "ledger.json") == [(Release(2.0, 0.5), 4)]
    # What is released says nothing of the cohort; the operator's file does.
    lines = read_metrics(tmp_path)
    assert len(lines) == 5
    for line in lines:
        assert not {word.strip('"') for word in SECRETS} & set(line)
        assert "accuracy" in line
    operator = [json.loads(x) for x in (tmp_path / "operator.jsonl").read_text().splitlines()]
    assert [line["round"] for line in operator] == [0, 1, 2, 3, 4]
    assert all({"invited", "replied", "rejected", "seconds"} <= set(line) for line in operator)
    for name in ("metrics.jsonl", "summary.json", "ledger.json"):
        text = (tmp_path / name).read_text()
        assert not [word for word in SECRETS if word in text]


def test_without_a_claim_there_is_no_figure_and_no_secret(tmp_path: Path) -> None:
    summary = private_run(tmp_path, claim_privacy=False, weighting="num-examples")
    assert summary["privacy"] is None
    assert summary["clients"] is not None
    assert all("invited" in line for line in read_metrics(tmp_path))
    assert not (tmp_path / "operator.jsonl").exists()
    assert not (tmp_path / "ledger.json").exists()


def test_noise_at_the_clients_says_what_the_server_learns(tmp_path: Path) -> None:
    summary = private_run(tmp_path, noise_location="client", clip_norm_from_data=True)
    privacy = summary["privacy"]
    assert "against everybody but the server" in privacy["claim"]
    assert "chosen from the clients' data" in privacy["claim"]
    local = privacy["local"]["epsilon"]
    # Four clients at most in a round of four: z/(2√4) in each of three rounds.
    assert local == pytest.approx(spent([(Release(0.5), 3)], 1e-5).epsilon)
    assert local > privacy["epsilon"]
    # On the same ledger the central figure grows, and what the server was sent before is not told.
    ledger = str(tmp_path / "ledger.json")
    more = private_run(tmp_path / "more", noise_location="client", ledger=ledger)["privacy"]
    assert more["rounds_charged"] == 2 * privacy["rounds_charged"]
    assert more["local"]["epsilon"] == pytest.approx(local)
    assert "messages of this run alone" in more["local"]["claim"]


def test_a_failed_run_does_not_say_how_many_replied(tmp_path: Path) -> None:
    """Krum needs five replies, and one of five clients fails."""
    options: dict[str, Any] = {
        "noise_location": "client",
        "participation": "full",
        "sample_rate": 1.0,
        "num_clients": 5,
        "num_byzantine": 1,
        "attack": "raise",
    }
    with pytest.raises(RunFailed, match="no round changed the model"):
        private_run(tmp_path, aggregator="krum", num_corrupt=1, **options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reason"].endswith("why is in the run folder's operator.jsonl alone")
    assert summary["rounds_skipped"] is None
    lines = [json.loads(line) for line in (tmp_path / "operator.jsonl").read_text().splitlines()]
    assert all("K" in line["skipped"] for line in lines if line["round"])


def test_a_robust_rule_claims_the_local_figure_alone(tmp_path: Path) -> None:
    summary = private_run(
        tmp_path, noise_location="client", aggregator="rage", participation="full", sample_rate=1.0
    )
    assert summary["privacy"]["epsilon"] is None
    assert summary["privacy"]["claim"].startswith("no central figure")
    assert summary["privacy"]["local"]["epsilon"] > 0
    assert not (tmp_path / "ledger.json").exists()


def test_max_epsilon_ends_the_run_with_the_last_allowed_model(tmp_path: Path) -> None:
    two, three = (spent([(Release(2.0, 0.5), n)], 1e-5).epsilon for n in (2, 3))
    ledger = str(tmp_path / "ledgers" / "digits.json")
    options: dict[str, Any] = {
        "max_epsilon": (two + three) / 2,
        "num_server_rounds": 5,
        "ledger": ledger,
    }
    summary = private_run(tmp_path / "one", checkpoint_every=1, **options)
    assert (summary["status"], summary["rounds_completed"]) == ("completed", 2)
    assert summary["privacy"]["epsilon"] <= options["max_epsilon"]
    last = model(tmp_path / "one", "round-00002")
    np.testing.assert_array_equal(model(tmp_path / "one"), last)
    # The budget is the clients', not the run's.
    with pytest.raises(ConfigError, match="even one more round would pass it"):
        private_run(tmp_path / "two", **options)
    more = private_run(tmp_path / "three", ledger=ledger, num_server_rounds=2)
    assert more["privacy"]["rounds_of_earlier_runs"] == 2
    assert more["privacy"]["epsilon"] == pytest.approx(
        spent([(Release(2.0, 0.5), 4)], 1e-5).epsilon
    )


def test_seeded_noise_runs_the_same_twice(tmp_path: Path) -> None:
    for location in ("server", "client"):
        models = []
        for name in ("one", "two"):
            folder = tmp_path / location / name
            summary = private_run(folder, noise_location=location, insecure_seeded_noise=True)
            assert summary["privacy"] is None
            models.append(model(folder))
        np.testing.assert_array_equal(models[0], models[1])
        private_run(tmp_path / location / "three", noise_location=location)
        assert np.abs(model(tmp_path / location / "three") - models[0]).max() > 1e-3


def test_a_run_that_died_says_what_it_had_spent(tmp_path: Path) -> None:
    private_run(tmp_path, num_server_rounds=3)
    (tmp_path / "summary.json").unlink()
    config = configuration(
        tmp_path,
        algorithm="dp-fedavg",
        clip_norm=1.0,
        noise_multiplier=2.0,
        participation="poisson",
        sample_rate=0.5,
        instruments=False,
    )
    write_failure(tmp_path, config, "killed", privacy_of_dead_run(config, tmp_path))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["status"] == "failed"
    assert summary["clients"] is None
    expected = spent([(Release(2.0, 0.5), 3)], 1e-5).epsilon
    assert summary["privacy"]["epsilon"] == pytest.approx(expected)
    assert math.isfinite(expected)


def test_a_ledger_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path would begin anew, with nothing spent."""
    ledger = tmp_path / "ledger.json"
    for folder, told in (("one", True), ("two", False)):
        private_run(tmp_path / folder, Console(width=500), ledger=str(ledger))
        line = f"ledger {ledger} does not exist: a new one begins there, with nothing spent"
        assert (f"warning: {line}" in capsys.readouterr().out) == told
        summary = read_summary(tmp_path / folder)
        assert summary is not None
        # The summary is released: without the folder.
        assert (line.replace(f"{tmp_path}/", "") in summary["warnings"]) == told
