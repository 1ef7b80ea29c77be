"""A node's own examples, from an .npz file or a folder of images."""

from pathlib import Path

import numpy as np
import torch

from blackthorn.installation import needing
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.own_arrays import (
    check_labels,
    check_pairs,
    class_folders,
    float_inputs,
    read_own_arrays,
    visible,
)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
_CHANNEL_MODES = {1: "L", 3: "RGB"}
# Modes of more than 8 bits a channel are left out: Pillow would saturate them without a word.
_READABLE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


def load_own_data(path: str, input_shape: tuple[int, ...], num_classes: int) -> Examples:
    """Read and check the examples at ``path``.

    * an .npz file with x [n, *input_shape], uint8 (scaled from 0..255 to [0, 1]) or floating
      (taken as it is), and y [n], any integer type, 0 <= y < num_classes. Pickles are refused.
    * a folder with one sub-folder for each of the num_classes classes (empty where the node has
      no example of it, so that all nodes number the classes alike: by sorted name), holding PNG
      or JPEG images of exactly input_shape = (1 or 3, height, width).

    Returns float32 inputs and int64 labels. Raises ValueError, one line that names the path.
    """
    location = Path(path).expanduser()
    if location.is_dir():
        x, y = _read_image_folder(location, input_shape, num_classes)
    else:
        x, y = read_own_arrays(location)
    return _checked(location, x, y, input_shape, num_classes)


def _checked(
    path: Path, x: np.ndarray, y: np.ndarray, input_shape: tuple[int, ...], num_classes: int
) -> Examples:
    where = f"data-path {str(path)!r}"
    if x.ndim == 0 or x.shape[1:] != tuple(input_shape):
        dims = _dims(input_shape)
        raise ValueError(
            f"{where}: x has shape {x.shape}, allowed is (n, {dims}): the task's input-shape is "
            f"{dims.replace(' ', '')}"
        )
    check_pairs(where, x, y)
    check_labels(where, y, num_classes)
    inputs = float_inputs(where, x)
    return Examples(torch.from_numpy(inputs), torch.from_numpy(y.astype(np.int64)))


def _dims(shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in shape)


def _read_image_folder(
    path: Path, input_shape: tuple[int, ...], num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    where = f"data-path {str(path)!r}"
    if len(input_shape) != 3 or input_shape[0] not in _CHANNEL_MODES:
        raise ValueError(
            f"{where}: an image folder cannot give inputs of shape ({_dims(input_shape)}), "
            "allowed are (1, height, width) and (3, height, width)"
        )
    folders = class_folders(path)
    if len(folders) != num_classes:
        raise ValueError(
            f"{where}: it has {len(folders)} sub-folders, and there must be one for each of the "
            f"{num_classes} classes (empty where there is no example)"
        )
    files = [
        (file, label)
        for label, folder in enumerate(folders)
        for file in sorted(entry for entry in folder.iterdir() if visible(entry))
    ]
    x = np.empty((len(files), *input_shape), dtype=np.uint8)
    for row, (file, _) in zip(x, files, strict=True):
        row[:] = _read_image(file, input_shape)
    return x, np.array([label for _, label in files], dtype=np.int64)


def _read_image(path: Path, input_shape: tuple[int, ...]) -> np.ndarray:
    """One image as uint8 [channels, height, width]; grey or RGB by the number of channels."""
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(f"image {str(path)!r}: allowed are {', '.join(IMAGE_SUFFIXES)} files")
    channels, height, width = input_shape
    # Imported here: whoever has an .npz file needs no Pillow.
    with needing("app", "a folder of images"):
        from PIL import Image
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            # Known from the header: an image of the wrong size is never decoded.
            if image.size != (width, height):
                raise ValueError(
                    f"it is {image.width} wide and {image.height} high, "
                    f"allowed is {width} and {height}"
                )
            if image.mode not in _READABLE_MODES:
                raise ValueError(
                    f"its mode is {image.mode}, allowed are {', '.join(_READABLE_MODES)}"
                )
            pixels = np.asarray(image.convert(_CHANNEL_MODES[channels]))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"image {str(path)!r}: {str(error).splitlines()[0]}") from error
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)
