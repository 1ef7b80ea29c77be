"""What must hold of a node's own examples whatever the run asks for; needs no PyTorch."""

from pathlib import Path

import numpy as np

from blackthorn.tasks.npz_file import read_npz


def check_own_examples(location: Path) -> None:
    """Look at an .npz file or an image folder before any run has said what it learns.

    Of a folder only its sub-folders are looked at: what an image may be is the run's to say.
    Raises ValueError, one line that names the path.
    """
    where = f"data-path {str(location)!r}"
    if location.is_dir():
        if not class_folders(location):
            raise ValueError(f"{where}: it has no sub-folders, allowed is one for each class")
        return
    x, y = read_own_arrays(location)
    if x.ndim < 2:
        raise ValueError(f"{where}: x has shape {x.shape}, allowed is (n, ...): n examples")
    check_pairs(where, x, y)
    check_labels(where, y)
    float_inputs(where, x)


def read_own_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """x and y of an .npz file. Raises ValueError, one line that names the path."""
    if not path.exists():
        raise ValueError(
            f"data-path {str(path)!r} does not exist: an .npz file or an image folder is"
        )
    try:
        arrays = read_npz(path, ("x", "y"))
    except ValueError as error:
        raise ValueError(
            f"data-path {str(path)!r} is not an .npz file with plain arrays x and y: {error}"
        ) from error
    return arrays["x"], arrays["y"]


def check_pairs(where: str, x: np.ndarray, y: np.ndarray) -> None:
    """Raises ValueError, begun with `where`, unless y has an integer for each of x's examples."""
    if y.shape != x.shape[:1]:
        raise ValueError(f"{where}: y has shape {y.shape}, allowed is ({len(x)},), as x")
    if len(x) == 0:
        raise ValueError(f"{where}: it holds 0 examples, at least 1 is needed")
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise ValueError(f"{where}: x has dtype {x.dtype}, allowed are uint8 and float")
    if y.dtype.kind not in "iu":
        raise ValueError(f"{where}: y has dtype {y.dtype}, allowed are integers")


def check_labels(where: str, y: np.ndarray, num_classes: int | None = None) -> None:
    """Raises ValueError, begun with `where`, that names the first row of y whose label is below 0
    or, of `num_classes` classes, none of them."""
    wrong, allowed = y < 0, "integers from 0"
    if num_classes is not None:
        wrong = wrong | (y >= num_classes)
        allowed = f"0 to {num_classes - 1}: num-classes is {num_classes}"
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"{where}, row {row} (from 0): y holds {y[row]}, allowed are {allowed}")


def float_inputs(where: str, x: np.ndarray) -> np.ndarray:
    """x in float32, bytes scaled to [0, 1]. Raises ValueError where it would not be finite."""
    # A float64 beyond float32's range becomes inf here and is refused below.
    with np.errstate(over="ignore"):
        inputs = x.astype(np.float32)
    if x.dtype == np.uint8:
        inputs /= 255
    problem = not_finite(inputs)
    if problem:
        raise ValueError(f"{where}: {problem}")
    return inputs


def not_finite(x: np.ndarray) -> str:
    """What to say of float inputs x [n, ...] that are not finite; empty where all are."""
    rows, *_ = np.nonzero(~np.isfinite(x))
    if len(rows) == 0:
        return ""
    values = "1 value that is" if len(rows) == 1 else f"{len(rows)} values that are"
    first = f"{'' if len(rows) == 1 else 'the first '}in row {rows[0]} (from 0)"
    return f"x holds {values} not finite in {x.dtype}, {first}"


def class_folders(path: Path) -> list[Path]:
    """The sub-folders of an image folder, by name. Raises ValueError if it cannot be read."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and visible(entry))
    except OSError as error:
        raise ValueError(f"data-path {str(path)!r} cannot be read: {error.strerror}") from error


def visible(entry: Path) -> bool:
    """Whether a file or folder counts: hidden ones are the operating system's."""
    return not entry.name.startswith(".")
