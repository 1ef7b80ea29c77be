"""The final models of short runs of every recipe are those on record.

What is compared is the norm and some projections, to the differences that other processors'
float32 sums make; golden_models.py prints what tells them apart bit for bit on one machine.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from golden_models import (
    OF_DIGITS,
    OF_RECIPES,
    RECIPES,
    RECORD,
    WITHOUT_DATA,
    final_model,
    fingerprint,
    needs_data,
)

TOLERANCE = 1e-4


@pytest.mark.parametrize("case", [*OF_RECIPES, *OF_DIGITS])
def test_the_final_model_is_the_one_on_record(case: str, tmp_path: Path) -> None:
    data_dir = os.environ.get("BLACKTHORN_DATA_DIR")
    if needs_data(case) and not data_dir:
        pytest.skip("BLACKTHORN_DATA_DIR is not set: it names the folder with MNIST")
    expected = json.loads(RECORD.read_text())[case]
    found = fingerprint(final_model(case, tmp_path / "run", data_dir))
    assert np.allclose(found, expected, rtol=0, atol=TOLERANCE * expected[0])


def test_every_recipe_is_on_record() -> None:
    assert {path.stem for path in RECIPES.glob("*.toml")} == {*OF_RECIPES, *WITHOUT_DATA}
    assert json.loads(RECORD.read_text()).keys() == {*OF_RECIPES, *OF_DIGITS}
