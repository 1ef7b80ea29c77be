"""The gradient of SmallCNN's cross-entropy in closed form, on a processor.

Images and activations are kept as [H, W, n, C], the examples and channels of a pixel adjacent in
memory: convolutions are then matrix products of whole rows of pixels, and the rest loops over
adjacent numbers (kernels.py). A step of automatic differentiation spends most of its
time outside the products; this one a fifth. Images go there and back in blocks, always in the
same memory, which the caches then hold.

Behind each convolution y = K * x (3x3, padded) come its bias, normalisation by groups of channels
(an example's mean m and variance v over a group), pooling and ReLU:

    ŷ = r (y + b − m),  r = (v + ε)^(−1/2),  out = ReLU(max over 2x2 of (γ ŷ + β))

The maximum is where y is largest (smallest, where γ < 0), so that only what is pooled has to be
normalised. Backwards, with G the gradient of out where out > 0, placed on the pixel that won its
window, zero elsewhere, and ⟨·⟩ the mean over a group of one example:

    ∂γ = Σ G ŷ,   ∂β = Σ G,   ∂y = r (γ G − ⟨γ G⟩ − ŷ ⟨γ G ŷ⟩),   ∂b = Σ ∂y

    ∂K = Σ over pixels of (what its window sees)ᵀ ∂y,   ∂x = ∂y Kᵀ, added up where it was seen
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackthorn.tasks.small_cnn import FIRST, GROUPS, HIDDEN, SECOND, kernels

_BLOCK = 16  # images; with 32, which need twice the memory, a step took a tenth longer
_Array = np.ndarray[Any, Any]


class GradientBuffers:
    """Where the gradients are computed: memory for a block of images, kept from step to step.

    Fresh memory would be cold to the caches: a step took half as long again. For one thread alone:
    a copy is another, empty room.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[Any, ...], _Block] = {}
        self._layers: tuple[_Layer, _Layer] | None = None

    def __deepcopy__(self, memo: object) -> "GradientBuffers":
        return GradientBuffers()

    def gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor, into: Tensor
    ) -> float:
        """Σ_j weights_j · cross-entropy of image j; its gradient goes ``into`` [d].

        Args:
            params: SmallCNN's parameters [d], contiguous, float32 or float64.
            x: that dtype [n, C, H, W], H, W >= 4.
            y: int64 [n].
            weights: that dtype [n].
            into: that dtype [d], contiguous.
        """
        first, second = self._loaded(params, x.shape[1])
        start = first.size + second.size
        dense, gradients = (_dense_views(vector[start:], x.shape) for vector in (params, into))
        into[start:] = 0
        loss = 0.0
        for images, labels, shares in zip(
            x.split(_BLOCK), y.split(_BLOCK), weights.split(_BLOCK), strict=True
        ):
            block = self._block(images)
            features = block.forward(images.contiguous(), first, second)
            part, below = _classify(dense, features, labels, shares, gradients)
            block.backward(below, first, second)
            loss += part
        first.store(into[: first.size])
        second.store(into[first.size : start])
        return loss

    def _loaded(self, params: Tensor, channels: int) -> "tuple[_Layer, _Layer]":
        if self._layers is None or self._layers[0].matrix.dtype != params.dtype:
            self._layers = (
                _Layer(channels, FIRST, params.dtype),
                _Layer(FIRST, SECOND, params.dtype),
            )
        first, second = self._layers
        first.load(params[: first.size])
        second.load(params[first.size : first.size + second.size])
        return first, second

    def _block(self, x: Tensor) -> "_Block":
        key = (x.shape, x.dtype)
        if key not in self._blocks:
            # Most batches are of one or two sizes; of many sizes only the newest two are kept.
            for old in list(self._blocks)[:-1]:
                del self._blocks[old]
            self._blocks[key] = _Block(x)
        return self._blocks[key]


class _Layer:
    """A convolution's parameters as the blocks use them, and where their gradients add up."""

    def __init__(self, channels: int, out: int, dtype: torch.dtype) -> None:
        # [9 C, O] for windows, row by row.
        self.matrix = torch.empty(9 * channels, out, dtype=dtype)
        self.moved = torch.empty_like(self.matrix)
        # Of the window's upper, middle and lower row. Views are made once: a step is so short that
        # making them anew would be a tenth of it.
        self.parts = self.matrix.chunk(3)
        self.parts_across = [part.T for part in self.parts]
        self.moved_parts = self.moved.chunk(3)
        self.size = self.matrix.numel() + 3 * out
        # b, γ and β [3, O], and their gradients.
        self.norm, self.sums = np.empty((2, 3, out), self.matrix.numpy().dtype)
        self._kernel = (out, channels, 9)

    def load(self, params: Tensor) -> None:
        """From the kernel [O, C, 3, 3], b, γ and β, one after the other in [size]."""
        kernel, norm = np.split(params.numpy(), [self.matrix.numel()])
        matrix = kernel.reshape(self._kernel).transpose(2, 1, 0)
        self.matrix.numpy().reshape(matrix.shape)[:] = matrix
        self.norm[:] = norm.reshape(self.norm.shape)
        self.sums[:] = 0
        self.moved.zero_()

    def store(self, into: Tensor) -> None:
        """The gradients in the order of `load`."""
        kernel, norm = np.split(into.numpy(), [self.moved.numel()])
        out, channels, _ = self._kernel
        kernel.reshape(self._kernel)[:] = (
            self.moved.numpy().reshape(9, channels, out).transpose(2, 1, 0)
        )
        norm.reshape(self.sums.shape)[:] = self.sums


class _Activations:
    """Behind a convolution: y [H, W, n, O], what the way back needs of it, and ∂y."""

    def __init__(self, like: Tensor, height: int, width: int, n: int, channels: int) -> None:
        self.y = like.new_empty(height, width, n, channels)
        self.out = like.new_empty(height // 2, width // 2, n, channels)
        self.below = torch.empty_like(self.out)
        self.deltas = torch.empty_like(self.y)
        columns = n * channels
        self._y, self._deltas = (each.view(-1, columns).numpy() for each in (self.y, self.deltas))
        self._out, self._below = (each.view(-1, columns).numpy() for each in (self.out, self.below))
        self._facts = like.new_empty(4, columns).numpy()
        self._highest = np.empty_like(self._out)
        self._width = width

    def forward_arguments(self, layer: _Layer) -> tuple[Any, ...]:
        """Those of kernels.normalise, from `y` to `out`."""
        return self._y, self._width, GROUPS, layer.norm, self._facts, self._highest, self._out

    def backward_arguments(self, layer: _Layer) -> tuple[Any, ...]:
        """Those of kernels.normalise_backward, from the gradient `below`, which is overwritten,
        to `deltas`; adds to the layer's."""
        return *self.forward_arguments(layer), self._below, self._deltas, layer.sums


class _Block:
    """Some images' way through both convolutions and back, always in the same memory."""

    def __init__(self, x: Tensor) -> None:
        n, channels, height, width = x.shape
        half = height // 2, width // 2
        self._first = _Activations(x, height, width, n, FIRST)
        self._second = _Activations(x, *half, n, SECOND)
        self._padded = x.new_zeros(channels, height + 2, width + 2, n).numpy()
        self._windows = x.new_empty(9 * channels, height * width * n)
        self._windows_there = self._windows.view(-1, height, width, n).numpy()
        # With each pixel its left and right neighbour [H, W, n, 3 C]: what a row of its window
        # sees; and the gradient for that.
        rows = x.new_empty(*half, n, 3 * FIRST)
        rows_moved = torch.empty_like(rows)
        self._features = x.new_empty(n, SECOND, half[0] // 2 * (half[1] // 2))
        self._y_flat, self._deltas_flat = (
            each.view(-1, FIRST) for each in (self._first.y, self._first.deltas)
        )
        self._windows_across = self._windows.T
        self._seen = _seen(rows, self._second.y)
        self._seen_moved = _seen(rows_moved, self._second.deltas)
        self._seen_across = [seen.T for seen, _ in self._seen]
        self._flat_features = self._features.flatten(1)
        self._features_there = self._features.numpy()
        self._pooled, self._pooled_below = self._first.out.numpy(), self._first.below.numpy()
        self._neighbours, self._neighbours_moved = rows.numpy(), rows_moved.numpy()
        self._out, self._below = (
            each.flatten(0, 1).numpy() for each in (self._second.out, self._second.below)
        )

    def forward(self, x: Tensor, first: _Layer, second: _Layer) -> Tensor:
        """The features [n, O H' W'] of images x [n, C, H, W], in the order of nn.Flatten."""
        kernels.windows(x.numpy(), self._padded, self._windows_there)
        torch.mm(self._windows_across, first.matrix, out=self._y_flat)
        kernels.normalise_to_rows(
            self._first.forward_arguments(first), self._pooled, self._neighbours
        )
        above, level, below = second.parts
        upper, middle, lower = self._seen
        torch.mm(middle[0], level, out=middle[1])
        upper[1].addmm_(upper[0], above)
        lower[1].addmm_(lower[0], below)
        kernels.normalise_to_features(
            self._second.forward_arguments(second), self._out, self._features_there
        )
        return self._flat_features

    def backward(self, gradient: Tensor, first: _Layer, second: _Layer) -> None:
        """Adds to the layers' gradients those of a gradient [n, O H' W'] for the features."""
        kernels.normalise_backward_from_features(
            gradient.numpy().reshape(self._features_there.shape),
            self._below,
            self._second.backward_arguments(second),
        )
        upper, middle, lower = self._seen_moved
        for into, seen, (_, own) in zip(
            second.moved_parts, self._seen_across, self._seen_moved, strict=True
        ):
            into.addmm_(seen, own)
        above, level, below = second.parts_across
        torch.mm(middle[1], level, out=middle[0])
        upper[0].addmm_(upper[1], above)
        lower[0].addmm_(lower[1], below)
        kernels.normalise_backward_from_rows(
            self._neighbours_moved, self._pooled_below, self._first.backward_arguments(first)
        )
        first.moved.addmm_(self._windows, self._deltas_flat)


def _seen(rows: Tensor, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For the upper, middle and lower row of the windows: `rows` [., 3 C] of those that see one,
    beside their `pixels` [., O] of [H, W, n, O]."""
    pairs = ((rows[:-1], pixels[1:]), (rows, pixels), (rows[1:], pixels[:-1]))
    return [(seen.flatten(0, 2), own.flatten(0, 2)) for seen, own in pairs]


def _dense_views(vector: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parameters of the dense layers, for images of a shape [n, C, H, W]."""
    inputs = SECOND * (shape[2] // 4) * (shape[3] // 4)
    classes = (len(vector) - HIDDEN * (inputs + 1)) // (HIDDEN + 1)
    sizes = (HIDDEN * inputs, HIDDEN, classes * HIDDEN, classes)
    matrix, bias, last_matrix, last_bias = vector.split(sizes)
    return matrix.view(HIDDEN, -1), bias, last_matrix.view(-1, HIDDEN), last_bias


def _classify(
    views: tuple[Tensor, ...],
    features: Tensor,
    y: Tensor,
    weights: Tensor,
    into: tuple[Tensor, ...],
) -> tuple[float, Tensor]:
    """The loss of the dense layers on features [n, p], and its gradient for those; the gradients
    for the layers are added ``into``."""
    matrix, bias, last_matrix, last_bias = views
    hidden = torch.addmm(bias, features, matrix.T)
    deltas = torch.empty_like(hidden)
    loss = kernels.classify(
        hidden.numpy(),
        last_matrix.numpy(),
        last_bias.numpy(),
        y.numpy(),
        weights.numpy(),
        deltas.numpy(),
        into[2].numpy(),
        into[3].numpy(),
        into[1].numpy(),
    )
    into[0].addmm_(deltas.T, features)
    return loss, deltas @ matrix
