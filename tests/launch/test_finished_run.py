"""Runs from Python: simulated by a recipe's name, and opened again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blackthorn
from blackthorn.settings.config import ConfigError


def test_a_run_from_python_is_the_recipe_s_and_can_be_opened_again(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "num_server_rounds": 2,
        "local_steps": 2,
        "aggregator": "rage",
        "seed": 1,
    }
    run = blackthorn.simulate("demo", **keys, output_dir=str(tmp_path / "run"), tensorboard=False)
    assert run.summary is not None and run.summary["status"] == "completed"
    again = blackthorn.open_run(tmp_path / "run")
    metrics = again.metrics
    assert list(metrics["round"]) == [0, 1, 2]
    assert metrics["accuracy"][2] == run.summary["final"]["accuracy"]
    assert again.plot("accuracy").read_bytes()[:4] == b"\x89PNG"
    probabilities = again.predict(np.zeros((3, 1, 8, 8), dtype=np.float32)).probabilities
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    assert again._repr_html_().startswith("<iframe")
    with pytest.raises(ConfigError, match="has no plot 'epsilon': there are accuracy, loss"):
        again.plot("epsilon")


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recipe dmeo does not exist; Blackthorn's own are demo"):
        blackthorn.simulate("dmeo")
    with pytest.raises(ConfigError, match="unknown key local-rate; did you mean local-lr"):
        blackthorn.simulate("demo", local_rate=1.0, output_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="is not a run folder"):
        blackthorn.open_run(tmp_path)
    assert not (tmp_path / "run").exists()
