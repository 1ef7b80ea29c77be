"""What must hold of a node's own examples whatever the run asks for; needs no PyTorch."""

from pathlib import Path

import numpy as np

from tasks.npz_file import read_npz


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
    if y.min() < 0:
        raise ValueError(f"{where}: y holds {y.min()}, allowed are integers from 0")
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
    """What to say of float inputs x that hold infinities or NaN; empty where they do not."""
    count = int((~np.isfinite(x)).sum())
    values = "1 value that is" if count == 1 else f"{count} values that are"
    return f"x holds {values} not finite in {x.dtype}" if count else ""


def class_folders(path: Path) -> list[Path]:
    """The sub-folders of an image folder, by name. Raises ValueError if it cannot be read."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and visible(entry))
    except OSError as error:
        raise ValueError(f"data-path {str(path)!r} cannot be read: {error.strerror}") from error


def visible(entry: Path) -> bool:
    """Whether a file or folder counts: hidden ones are the operating system's."""
    return not entry.name.startswith(".")
