"""A node's own data: good files are read exactly, every bad one gives one line."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from blackthorn.tasks.npz_file import read_npz
from blackthorn.tasks.own_arrays import check_own_examples
from blackthorn.tasks.own_data import load_own_data

SHAPE = (1, 4, 3)


def write_npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def good(n: int = 5) -> dict[str, np.ndarray]:
    return {
        "x": np.random.default_rng(0).random((n, *SHAPE)).astype(np.float32),
        "y": np.arange(n) % 3,
    }


def refusal(path: str, shape: tuple[int, ...] = SHAPE, num_classes: int = 3) -> str:
    with pytest.raises(ValueError) as error:
        load_own_data(path, shape, num_classes)
    message = str(error.value)
    assert "\n" not in message
    assert path in message
    return message


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floating_inputs_are_taken_as_they_are(tmp_path: Path, dtype: type) -> None:
    x: np.ndarray = (np.random.default_rng(1).normal(size=(6, *SHAPE)) * 5).astype(dtype)
    y = np.array([2, 0, 1, 1, 0, 2], dtype=np.uint8)
    examples = load_own_data(write_npz(tmp_path / "a.npz", x=x, y=y), SHAPE, 3)
    assert examples.x.dtype == torch.float32
    assert examples.y.dtype == torch.int64
    np.testing.assert_array_equal(examples.x.numpy(), x.astype(np.float32))
    assert examples.y.tolist() == y.tolist()


def test_bytes_are_divided_by_255(tmp_path: Path) -> None:
    x = (11 * np.arange(24)).astype(np.uint8).reshape(2, *SHAPE)
    examples = load_own_data(write_npz(tmp_path / "a.npz", x=x, y=[0, 1]), SHAPE, 2)
    np.testing.assert_allclose(examples.x.numpy(), x / 255.0, rtol=1e-6)


def test_flat_inputs_stay_flat(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", x=np.ones((3, 7)), y=[0, 1, 1])
    assert load_own_data(path, (7,), 2).x.shape == (3, 7)


def with_value(value: float, dtype: type = np.float32) -> np.ndarray:
    x: np.ndarray = good()["x"].astype(dtype)
    x[2, 0, 1, 1] = value
    return x


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((5, 4, 3))}, r"x has shape \(5, 4, 3\), allowed is \(n, 1, 4, 3\)"),
        ({"x": np.float32(3)}, r"x has shape \(\), allowed is"),
        ({"x": np.ones((0, *SHAPE)), "y": np.zeros(0, dtype=int)}, "0 examples"),
        ({"y": np.arange(4)}, r"y has shape \(4,\), allowed is \(5,\)"),
        ({"y": np.zeros((5, 1), dtype=int)}, r"y has shape \(5, 1\)"),
        ({"y": np.array([0, 1, 2, 3, 0])}, "y holds 3, allowed are 0 to 2"),
        ({"y": np.array([0, 1, 2, -1, 0])}, "y holds -1, allowed are 0 to 2"),
        ({"y": np.full(5, 2**63, dtype=np.uint64)}, "y holds 9223372036854775808"),
        ({"y": np.zeros(5)}, "y has dtype float64, allowed are integers"),
        ({"y": np.zeros(5, dtype=bool)}, "y has dtype bool"),
        ({"x": with_value(np.nan)}, "x holds 1 value that is not finite"),
        ({"x": with_value(-np.inf)}, "x holds 1 value that is not finite"),
        ({"x": with_value(1e300, np.float64)}, "x holds 1 value that is not finite"),
        ({"x": np.ones((5, *SHAPE), dtype=np.int64)}, "x has dtype int64, allowed are uint8 and"),
        ({"x": np.ones((5, *SHAPE), dtype=complex)}, "x has dtype complex128"),
    ],
)
def test_arrays_of_wrong_shape_type_or_values_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    path = write_npz(tmp_path / "bad.npz", **{**good(), **arrays})
    with pytest.raises(ValueError, match=message):
        load_own_data(path, SHAPE, 3)
    refusal(path)


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    assert "no array y" in refusal(write_npz(tmp_path / "a.npz", x=good()["x"]))


class Explosive:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was loaded",)


def test_pickles_are_refused(tmp_path: Path) -> None:
    objects = np.empty(5, dtype=object)
    objects[:] = [Explosive() for _ in range(5)]
    refusal(write_npz(tmp_path / "a.npz", x=good()["x"], y=objects))
    (tmp_path / "b.npz").write_bytes(pickle.dumps({"x": Explosive()}))
    refusal(str(tmp_path / "b.npz"))


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 cut short"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    assert "is not an .npz file" in refusal(str(tmp_path / "a.npz"))


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((500, *SHAPE)), y=np.zeros(500, dtype=int))
    content = bytearray(path.read_bytes())
    content[60:90] = b"\xff" * 30
    path.write_bytes(content)
    assert "is not an .npz file" in refusal(str(path))


def test_a_single_array_is_no_archive(tmp_path: Path) -> None:
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.ones(3))
    refusal(str(tmp_path / "a.npz"))


def test_a_member_that_is_no_array_is_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", x=good()["x"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y.npy", "0 1 2 0 1")
    assert "no array y" in refusal(path)


def test_what_no_run_would_take_is_known_without_a_run(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, **{**good(), "y": np.array([0, 1, 2, 3, 400])})
    check_own_examples(path)
    for arrays, expected in (
        ({"x": np.ones(5)}, r"x has shape \(5,\), allowed is \(n, ...\)"),
        ({"y": np.arange(4)}, r"y has shape \(4,\), allowed is \(5,\)"),
        ({"y": np.zeros(5)}, "y has dtype float64, allowed are integers"),
        ({"y": np.array([0, 1, 2, -1, 0])}, "y holds -1, allowed are integers from 0"),
        ({"x": with_value(np.nan)}, "x holds 1 value that is not finite"),
    ):
        write_npz(path, **{**good(), **arrays})
        with pytest.raises(ValueError, match=expected):
            check_own_examples(path)
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match="it has no sub-folders, allowed is one for each class"):
        check_own_examples(tmp_path / "images")
    (tmp_path / "images" / "cat").mkdir()
    check_own_examples(tmp_path / "images")


def test_what_is_no_file_is_said_to_be_so(tmp_path: Path) -> None:
    for path, expected in (
        (tmp_path / "absent.npz", "^it does not exist$"),
        (tmp_path, "^it is a folder or a device$"),
    ):
        with pytest.raises(ValueError, match=expected):
            read_npz(path, ("x",))


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(str(tmp_path / "absent.npz"))


def write_image(path: Path, pixels: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)


@pytest.mark.parametrize("reverse", [False, True])
def test_grey_images_are_read_in_order_of_folder_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    # Classes by sorted name: apple 0, banana 1 (empty), cherry 2.
    write_image(tmp_path / "cherry" / "1.png", pixels[0])
    write_image(tmp_path / "apple" / "b.PNG", pixels[2])
    write_image(tmp_path / "apple" / "a.png", pixels[1], "RGB")
    (tmp_path / "banana").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "apple" / ".DS_Store").write_bytes(b"x")
    # A file system may list a folder in any order.
    listing = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: sorted(listing(self), reverse=reverse))
    examples = load_own_data(str(tmp_path), SHAPE, 3)
    assert examples.y.tolist() == [0, 0, 2]
    np.testing.assert_allclose(examples.x[:, 0].numpy(), pixels[[1, 2, 0]] / 255.0, rtol=1e-6)


def test_colour_images_are_read_channels_first(tmp_path: Path) -> None:
    colour = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    grey = np.full((5, 6), 51, dtype=np.uint8)
    write_image(tmp_path / "0" / "a.png", colour)
    write_image(tmp_path / "1" / "b.jpeg", grey)
    examples = load_own_data(str(tmp_path), (3, 5, 6), 2)
    np.testing.assert_allclose(examples.x[0].numpy(), colour.transpose(2, 0, 1) / 255.0, rtol=1e-6)
    np.testing.assert_allclose(examples.x[1].numpy(), 0.2, atol=0.01)


def test_an_image_of_another_size_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "0" / "a.png", np.zeros((3, 4), dtype=np.uint8))
    message = refusal(str(tmp_path), SHAPE, 1)
    assert "a.png" in message
    assert "4 wide and 3 high, allowed is 3 and 4" in message


def test_sixteen_bit_images_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "0" / "a.png", np.full((4, 3), 40_000, dtype=np.uint16))
    assert "mode is I;16" in refusal(str(tmp_path), SHAPE, 1)


def test_the_number_of_classes_must_be_the_tasks(tmp_path: Path) -> None:
    write_image(tmp_path / "0" / "a.png", np.zeros((4, 3), dtype=np.uint8))
    assert "1 sub-folders, and there must be one for each of the 2" in refusal(
        str(tmp_path), SHAPE, 2
    )


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    assert "0 examples" in refusal(str(tmp_path), SHAPE, 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.png", b""),
        ("a.png", b"no image"),
        ("a.jpg", b"\xff\xd8\xff\xe0 cut short"),
        ("a.bmp", b"BM"),
        ("notes.txt", b"text"),
    ],
)
def test_files_that_are_no_images_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / name).write_bytes(content)
    assert name in refusal(str(tmp_path), SHAPE, 1)


def test_a_truncated_image_is_refused(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30), dtype=np.uint8)
    path = tmp_path / "0" / "a.png"
    write_image(path, pixels)
    path.write_bytes(path.read_bytes()[:400])
    refusal(str(tmp_path), (1, 40, 30), 1)


@pytest.mark.parametrize("shape", [(12,), (2, 4, 3), (4, 3)])
def test_folders_give_grey_or_colour_only(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert "allowed are (1, height, width) and (3" in refusal(str(tmp_path), shape, 1)
