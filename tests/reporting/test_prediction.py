"""Predictions from posterior samples, and how calibrated they are, against naive definitions."""

import io
import math
import re
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from rich.console import Console
from safetensors.numpy import save_file

from blackthorn.launch.commands.predict import predict as predict_command
from blackthorn.recording.folder_place import WITHHELD
from blackthorn.recording.posterior_store import FOLDER, PosteriorStore
from blackthorn.reporting.calibration import NUM_BINS, auroc, calibration
from blackthorn.reporting.prediction import predict
from blackthorn.settings.config import ConfigError, make_config, to_mapping
from blackthorn.tasks.problem import load_problem

CLASSES = 3


def own_run(folder: Path, samples: int = 4) -> list[dict[str, np.ndarray]]:
    """A run of logistic regression on 2 inputs with `samples` stored; returns their states, and
    the final model's as the last."""
    folder.mkdir()
    config = make_config(
        {
            "algorithm": "fa-ld",
            "task": "own-data",
            "model": "logistic",
            "input-shape": "2",
            "num-classes": CLASSES,
        }
    )
    (folder / "config.toml").write_text(tomli_w.dumps(to_mapping(config)))
    generator = np.random.default_rng(4)
    names = {k: tuple(v.shape) for k, v in load_problem(config).state().items()}
    states = [
        {k: generator.normal(0, 2, shape).astype(np.float32) for k, shape in names.items()}
        for _ in range(samples + 1)
    ]
    store = PosteriorStore(folder / FOLDER, 100, "last", 0)
    for number, state in enumerate(states[:-1]):
        store.offer(number + 1, state)
    (folder / "checkpoints").mkdir()
    save_file(states[-1], folder / "checkpoints" / "final.safetensors")
    return states


def softmax_by_hand(state: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    weight = next(v for v in state.values() if v.ndim == 2).astype(np.float64)
    bias = next(v for v in state.values() if v.ndim == 1).astype(np.float64)
    rows = []
    for example in x:
        logits = [float(w @ example) + float(b) for w, b in zip(weight, bias, strict=True)]
        total = sum(math.exp(v) for v in logits)
        rows.append([math.exp(v) / total for v in logits])
    return np.array(rows)


def entropy_by_hand(p: np.ndarray) -> float:
    return -sum(v * math.log(v) for v in p if v > 0)


def test_predictions_are_the_mean_over_the_samples(tmp_path: Path) -> None:
    states = own_run(tmp_path / "run")
    x = np.random.default_rng(1).normal(size=(7, 2)).astype(np.float32)
    found = predict(tmp_path / "run", x)
    each = np.stack([softmax_by_hand(state, x) for state in states[:-1]])
    np.testing.assert_allclose(found.probabilities, each.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.point, softmax_by_hand(states[-1], x), rtol=1e-5)
    for row in range(7):
        total = entropy_by_hand(each[:, row].mean(axis=0))
        expected = np.mean([entropy_by_hand(p) for p in each[:, row]])
        assert found.entropy[row] == pytest.approx(total, rel=1e-5)
        assert found.mutual_information[row] == pytest.approx(total - expected, abs=1e-6)
        point = entropy_by_hand(found.point[row])
        assert found.point_entropy[row] == pytest.approx(point, rel=1e-9)
    assert found.num_samples == 4
    # The samples disagree, or the comparison would say nothing.
    assert found.mutual_information.max() > 0.05


def test_one_sample_has_no_mutual_information(tmp_path: Path) -> None:
    own_run(tmp_path / "run", samples=1)
    found = predict(tmp_path / "run", np.eye(2, dtype=np.float32))
    np.testing.assert_allclose(found.mutual_information, 0, atol=1e-12)


def ece_by_hand(probabilities: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for b in range(NUM_BINS):
        low, high = b / NUM_BINS, (b + 1) / NUM_BINS
        inside = [i for i, p in enumerate(probabilities) if low < p.max() <= high]
        if inside:
            right = np.mean([probabilities[i].argmax() == y[i] for i in inside])
            confidence = np.mean([probabilities[i].max() for i in inside])
            total += len(inside) / len(y) * abs(right - confidence)
    return float(total)


def test_calibration_figures_are_their_definitions() -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.full(CLASSES, 0.4), size=500)
    y = np.array([generator.choice(CLASSES, p=p) for p in probabilities])
    y[:60] = 0
    found = calibration(probabilities, y)
    assert found.accuracy == np.mean(probabilities.argmax(axis=1) == y)
    nll = -np.mean([math.log(p[label]) for p, label in zip(probabilities, y, strict=True)])
    assert found.nll == pytest.approx(nll)
    brier = np.mean(
        [
            sum((p[c] - (c == label)) ** 2 for c in range(CLASSES))
            for p, label in zip(probabilities, y, strict=True)
        ]
    )
    assert found.brier == pytest.approx(brier)
    assert found.ece == pytest.approx(ece_by_hand(probabilities, y))
    assert found.ece > 0.005
    assert found.entropy == pytest.approx(np.mean([entropy_by_hand(p) for p in probabilities]))
    assert found.counts.sum() == 500


def test_sure_and_uniform_answers_have_known_calibration() -> None:
    sure = np.eye(CLASSES)[[0, 1, 2, 0]]
    right = calibration(sure, np.array([0, 1, 2, 0]))
    assert (right.accuracy, right.nll, right.brier, right.ece, right.entropy) == (1, 0, 0, 0, 0)
    # Sure and wrong half the time: confidence 1 and accuracy ½; a finite, huge NLL.
    wrong = calibration(sure, np.array([0, 1, 0, 1]))
    assert wrong.ece == 0.5
    assert wrong.brier == 1.0
    assert 300 < wrong.nll < 400
    uniform = calibration(np.full((4, 4), 0.25), np.array([0, 1, 2, 3]))
    assert uniform.ece == 0.0
    assert uniform.entropy == pytest.approx(math.log(4))
    with pytest.raises(ValueError, match="allowed are 0 to 2"):
        calibration(sure, np.array([0, 1, 2, 3]))


def files(folder: Path, **arrays: Any) -> Path:
    path = folder / "examples.npz"
    np.savez(path, **arrays)
    return path


def test_the_command_writes_predictions_report_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = own_run(tmp_path / "run")
    generator = np.random.default_rng(1)
    x = generator.normal(size=(30, 2)).astype(np.float32)
    y = softmax_by_hand(states[0], x).argmax(axis=1)
    data = files(tmp_path, x=x, y=y)
    elsewhere = tmp_path / "elsewhere.npz"
    np.savez(elsewhere, x=10 * x)
    out = tmp_path / "out" / "predictions.npz"
    console = Console(width=200)
    predict_command(tmp_path / "run", data, console, out=out, ood=elsewhere)
    text = capsys.readouterr().out
    assert "30 examples, 4 posterior samples" in text
    assert "posterior mean" in text and "point estimate" in text
    assert re.search(r"^brier +reliability +resolution +uncertainty +within$", text, re.MULTILINE)
    assert "tempered" not in text, "30 labels are too few"
    uncertain = [predict(tmp_path / "run", xs).entropy for xs in (x, 10 * x)]
    assert f"told apart (AUROC; 0.5: not at all): entropy {auroc(*uncertain):.4f}, mutual" in text
    written = np.load(out)
    expected = predict(tmp_path / "run", x)
    np.testing.assert_array_equal(written["probabilities"], expected.probabilities)
    np.testing.assert_array_equal(written["mutual_information"], expected.mutual_information)
    for name in ("reliability-examples.png", "entropy-examples-elsewhere.png"):
        assert (out.parent / name).read_bytes().startswith(b"\x89PNG")


def test_without_a_place_of_its_own_what_is_drawn_is_nothing_that_a_run_releases(
    tmp_path: Path,
) -> None:
    """The plots count examples that may be a client's."""
    own_run(tmp_path / "run")
    before = set((tmp_path / "run").rglob("*"))
    generator = np.random.default_rng(1)
    data = files(tmp_path, x=generator.normal(size=(9, 2)), y=np.zeros(9, dtype=np.int64))
    elsewhere = tmp_path / "elsewhere.npz"
    np.savez(elsewhere, x=generator.normal(size=(9, 2)))
    predict_command(tmp_path / "run", data, Console(quiet=True), ood=elsewhere)
    drawn = set((tmp_path / "run").rglob("*")) - before
    folder = tmp_path / "run" / "predictions"
    names = ("reliability-examples.png", "entropy-examples-elsewhere.png")
    assert drawn == {folder, *(folder / name for name in names)}
    assert folder.name in WITHHELD
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"y": np.zeros(3)}, "no array x"),
        ({"x": np.zeros((3, 5))}, r"x has shape \(3, 5\): allowed is \(n, 2\)"),
        ({"x": np.zeros((0, 2))}, "n >= 1"),
        ({"x": np.zeros((3, 2), dtype=int)}, "allowed are uint8 and floating"),
        ({"x": np.array([["a", "b"]])}, "x has dtype <U1: allowed are uint8 and floating"),
        ({"x": np.array([[1, np.nan], [np.inf, 0]])}, r"\.npz: x holds 2 values that are not fini"),
        ({"x": np.array([[1e40, 0]])}, "x holds 1 value that is not finite in float32"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, "one integer for each"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1, 7])}, "allowed are 0 to 2"),
    ],
)
def test_wrong_data_are_one_line(tmp_path: Path, arrays: dict[str, Any], expected: str) -> None:
    own_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=expected) as caught:
        predict_command(tmp_path / "run", files(tmp_path, **arrays), Console(quiet=True))
    assert "\n" not in str(caught.value)


def test_what_is_no_run_or_has_no_model_yet_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        predict(tmp_path, np.zeros((1, 2)))
    own_run(tmp_path / "run", samples=0)
    (tmp_path / "run" / "checkpoints" / "final.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no model yet"):
        predict(tmp_path / "run", np.zeros((1, 2)))


def test_a_run_without_samples_predicts_with_its_final_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [state] = own_run(tmp_path / "run", samples=0)
    x = np.random.default_rng(1).normal(size=(12, 2)).astype(np.float32)
    expected = softmax_by_hand(state, x)
    y = expected.argmax(axis=1)
    y[0] = (y[0] + 1) % CLASSES
    out = tmp_path / "predictions.npz"
    predict_command(
        tmp_path / "run", files(tmp_path, x=x, y=y), Console(width=200), out=out, ood=None
    )
    text = capsys.readouterr().out
    assert "12 examples, the final model" in text
    assert "posterior" not in text and "information" not in text
    # One of twelve labels is wrong on purpose.
    told = [line.split()[2] for line in text.splitlines() if line.startswith("final model")]
    # Then come the parts of both scores.
    assert told[0] == f"{11 / 12:.4f}"
    assert len(told) == 3
    written = np.load(out)
    assert sorted(written) == ["entropy", "probabilities"]
    np.testing.assert_allclose(written["probabilities"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        written["entropy"], [entropy_by_hand(p) for p in expected], rtol=1e-5
    )


@pytest.mark.parametrize("wrong", ["x", "y"])
def test_an_archive_s_member_that_is_no_array_is_named(tmp_path: Path, wrong: str) -> None:
    own_run(tmp_path / "run")
    path = tmp_path / "examples.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x", "y"):
            stream = io.BytesIO()
            np.save(stream, np.zeros((3, 2)))
            archive.writestr(f"{name}.npy", b"hello" if name == wrong else stream.getvalue())
    with pytest.raises(ConfigError, match=f"its {wrong} is no array"):
        predict_command(tmp_path / "run", path, Console(quiet=True))


def test_a_damaged_archive_is_one_line(tmp_path: Path) -> None:
    own_run(tmp_path / "run")
    path = tmp_path / "examples.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(4000, 2)))
    damaged = bytearray(path.read_bytes())
    damaged[2000:2400] = b"\xff" * 400
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"cannot be read as an \.npz file with an array x"):
        predict_command(tmp_path / "run", path, Console(quiet=True))


def test_floating_inputs_predict_alike_in_any_byte_order_and_precision(tmp_path: Path) -> None:
    own_run(tmp_path / "run")
    x = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)
    expected = predict(tmp_path / "run", x).probabilities
    for dtype in (">f4", "<f8", ">f8", np.longdouble):
        found = predict(tmp_path / "run", x.astype(dtype)).probabilities
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "torn", [f"{FOLDER}/slot-00001.safetensors", "checkpoints/final.safetensors"]
)
def test_a_torn_file_or_another_model_s_is_one_line(tmp_path: Path, torn: str) -> None:
    own_run(tmp_path / "run")
    path = tmp_path / "run" / torn
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ConfigError, match=f"{path.name} is not a") as caught:
        predict(tmp_path / "run", np.zeros((1, 2)))
    assert "\n" not in str(caught.value)
    save_file({"weight": np.zeros(3)}, path, metadata={"round": "2", "number": "1"})
    with pytest.raises(ConfigError, match="cannot be predicted with: parameter"):
        predict(tmp_path / "run", np.zeros((1, 2)))


def test_two_files_of_one_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_run(tmp_path / "run")
    (tmp_path / "far").mkdir()
    x = np.random.default_rng(1).normal(size=(30, 2))
    data, elsewhere = files(tmp_path, x=x), files(tmp_path / "far", x=10 * x)
    predict_command(tmp_path / "run", data, Console(width=300), ood=elsewhere)
    text = capsys.readouterr().out
    assert "mean predictive entropy: examples " in text
    assert ", examples (elsewhere) " in text


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    own_run(tmp_path / "run")
    (tmp_path / "taken").write_text("a file")
    data = files(tmp_path, x=np.zeros((3, 2)))
    with pytest.raises(ConfigError, match="taken cannot be written"):
        predict_command(
            tmp_path / "run", data, Console(quiet=True), out=tmp_path / "taken" / "out.npz"
        )


def test_integers_are_scaled_as_in_training(tmp_path: Path) -> None:
    own_run(tmp_path / "run")
    bytes_ = np.array([[0, 255], [51, 102]], dtype=np.uint8)
    found = predict(tmp_path / "run", bytes_)
    expected = predict(tmp_path / "run", torch.tensor([[0.0, 1.0], [0.2, 0.4]]))
    np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=1e-6)
