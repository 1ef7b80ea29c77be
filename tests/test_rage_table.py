"""RAGE and the mean under the six attacks of Data and Diggavi, section VI, on MNIST."""

from pathlib import Path

import pytest
from rich.console import Console

from launch.recipes import recipe_config
from launch.simulate import simulate

# Test accuracy in %, one seed, measured by an independent implementation.
EXPECTED = {
    ("random-gradient", "mean"): 83.9,
    ("random-gradient", "rage"): 83.8,
    ("reverse-average", "mean"): 82.5,
    ("reverse-average", "rage"): 80.3,
    ("gradient-shift", "mean"): 24.9,
    ("gradient-shift", "rage"): 84.8,
    ("all-ones", "mean"): 17.7,
    ("all-ones", "rage"): 84.7,
    ("baruch", "mean"): 84.8,
    ("baruch", "rage"): 84.6,
    ("reverse-scaled-average", "mean"): 10.3,
    ("reverse-scaled-average", "rage"): 84.7,
}


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "aggregator"), EXPECTED)
def test_the_row_is_reproduced(
    repository: Path, tmp_path: Path, data_dir: str, attack: str, aggregator: str
) -> None:
    options = {
        "attack": attack,
        "aggregator": aggregator,
        "data-dir": data_dir,
        "output-dir": str(tmp_path),
        "instruments": False,
    }
    config = recipe_config(repository / "recipes" / "rage-mnist.toml", (), options)
    accuracy = 100 * simulate(config, Console(quiet=True))["final"]["accuracy"]
    tolerance = 5 if attack == "random-gradient" else 3
    assert accuracy == pytest.approx(EXPECTED[attack, aggregator], abs=tolerance)
