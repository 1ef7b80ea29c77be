"""A small convolutional network, and the gradient of its cross-entropy in closed form.

Images and activations are kept as [H, W, n, C], the examples and channels of a pixel adjacent in
memory: convolutions are then matrix products of whole rows of pixels, and to PyTorch's pooling
and moments the batch is one image of n·C channels, which they do fast. A step of automatic
differentiation spends most of its time outside the products.

Behind each convolution y = K * x (3x3, padded) come its bias, normalisation by groups of channels
(an example's mean m and variance v over a group), pooling and ReLU:

    ŷ = r (y + b − m),  r = (v + ε)^(−1/2),  out = ReLU(max over 2x2 of (γ ŷ + β))

The maximum is where y is largest (smallest, where γ < 0), so that only what is pooled has to be
normalised. Backwards, with G the gradient of out where out > 0, placed on the pixel that won its
window, zero elsewhere, and ⟨·⟩ the mean over a group of one example:

    ∂γ = Σ G ŷ,   ∂β = Σ G,   ∂y = r (γ G − ⟨γ G⟩ − ŷ ⟨γ G ŷ⟩),   ∂b = Σ ∂y

    ∂K = Σ over pixels of (what its window sees)ᵀ ∂y,   ∂x = ∂y Kᵀ, added up where it was seen
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

_GROUPS = 4
_EPSILON = 1e-5  # GroupNorm's own
_WINDOW = ([2, 2], [2, 2])  # size and stride of the pooling

_pool = torch.ops.aten.max_pool2d_with_indices
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward


class ChannelsLast(nn.Module):
    """The same images [n, C, H, W] with a pixel's channels adjacent in memory, which PyTorch's
    pooling on a CPU needs to be vectorised.

    In evaluation mode, in which FlatModel trains too. In training mode they stay as they are:
    Opacus works in it, and misreads the gradients of convolutions in any other layout.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself in value and shape."""
        if self.training:
            return x
        # torch.channels_last by name is not possible under vmap.
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


class SmallCNN(nn.Sequential):
    """Two 3x3 convolutions (16 and 32 channels), each with GroupNorm, 2x2 max pooling and ReLU,
    then a dense layer of 64: outputs [n, num_classes] from images [n, C, H, W], H, W >= 4.

    ReLU after pooling is the same function for a quarter of the work. GroupNorm because
    BatchNorm's running statistics are no parameters, and differ by client.
    """

    # Under vmap the convolutions of many clients become one grouped convolution, which is
    # slower on a CPU than one client after the other.
    batching = "loop"

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        channels, height, width = input_shape
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, 16, 3, padding=1),
                layout1=ChannelsLast(),
                norm1=nn.GroupNorm(_GROUPS, 16),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(16, 32, 3, padding=1),
                norm2=nn.GroupNorm(_GROUPS, 32),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                dense=nn.Linear(32 * (height // 4) * (width // 4), 64),
                relu3=nn.ReLU(),
                output=nn.Linear(64, num_classes),
            )
        )
        # As named_parameters() has them.
        self._shapes = [parameter.shape for parameter in self.parameters()]

    def analytic_loss_and_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropies [B] and their gradients [B, d], one client after the other; see
        FlatModel, and the head of this file."""
        losses, gradients = params.new_empty(len(params)), torch.empty_like(params)
        for client, into in enumerate(gradients):
            views = self._views(params[client])
            losses[client], parts = _loss_and_gradients(
                views, x[client], y[client], weights[client]
            )
            for view, part in zip(self._views(into), parts, strict=True):
                view.copy_(part)
        return losses, gradients

    def _views(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _loss_and_gradients(
    views: list[Tensor], x: Tensor, y: Tensor, weights: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The weighted loss of images x [n, C, H, W], and its gradient for each parameter."""
    kernel1, bias1, scale1, shift1, kernel2, bias2, scale2, shift2, *dense = views
    n, _, height, width = x.shape
    matrix1, matrix2 = _matrix(kernel1), _matrix(kernel2)
    windows = _windows(x)
    first = _normalise((windows.T @ matrix1).view(height, width, n, -1), bias1, scale1, shift1)
    rows = _rows(first.out)
    second = _normalise(_convolve(rows, matrix2), bias2, scale2, shift2)
    features = second.out.permute(2, 3, 0, 1)
    loss, below, dense_gradients = _classify(dense, features.flatten(1), y, weights)
    below = below.view_as(features).permute(2, 3, 0, 1).contiguous()
    deltas2, norm2 = _normalise_backward(second, below)
    deltas1, norm1 = _normalise_backward(first, _convolve_backward(deltas2, matrix2))
    moved1 = windows @ deltas1.view(-1, len(kernel1))
    moved2 = torch.cat([seen.T @ deltas for seen, deltas in _seen(rows, deltas2)])
    gradients1 = [_kernel(moved1, kernel1), *norm1]
    return loss, [*gradients1, _kernel(moved2, kernel2), *norm2, *dense_gradients]


def _classify(
    views: list[Tensor], features: Tensor, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss of the dense layers on features [n, p], and its gradients for those and for them."""
    matrix, bias, last_matrix, last_bias = views
    hidden = torch.addmm(bias, features, matrix.T).relu_()
    logs = torch.log_softmax(torch.addmm(last_bias, hidden, last_matrix.T), dim=1)
    labels = y[:, None]
    loss = -torch.dot(weights, logs.gather(1, labels)[:, 0])
    last = logs.exp_().scatter_add_(1, labels, -torch.ones_like(logs[:, :1]))
    last *= weights[:, None]
    deltas = _where_positive(hidden, last @ last_matrix)
    gradients = [deltas.T @ features, deltas.sum(dim=0), last.T @ hidden, last.sum(dim=0)]
    return loss, deltas @ matrix, gradients


def _matrix(kernel: Tensor) -> Tensor:
    """A kernel [O, C, 3, 3] as a matrix [9 C, O] for windows, row by row."""
    return kernel.permute(2, 3, 1, 0).reshape(-1, len(kernel))


def _kernel(matrix: Tensor, like: Tensor) -> Tensor:
    """The kernel [O, C, 3, 3] of such a matrix."""
    return matrix.view(3, 3, *like.shape[1::-1]).permute(3, 2, 0, 1)


def _windows(x: Tensor) -> Tensor:
    """What each pixel's window sees of images [n, C, H, W]: [9 C, H W n]. For the few channels
    of an input: its many copies of each number lie in rows."""
    padded = nn.functional.pad(x.permute(1, 2, 3, 0), (0, 0, 1, 1, 1, 1))
    height, width = x.shape[2:]
    parts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return torch.stack(parts).view(9 * x.shape[1], -1)


def _rows(x: Tensor) -> Tensor:
    """[H, W, n, 3 C] of images [H, W, n, C]: with each pixel its left and right neighbour, which
    is what a row of its window sees."""
    padded = nn.functional.pad(x, (0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, i : i + x.shape[1]] for i in range(3)], dim=3)


def _seen(rows: Tensor, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For the upper, middle and lower row of the windows: `rows` [., 3 C] of those that see one,
    beside their `pixels` [., O] of [H, W, n, O]."""
    pairs = ((rows[:-1], pixels[1:]), (rows, pixels), (rows[1:], pixels[:-1]))
    return [(seen.flatten(0, 2), own.flatten(0, 2)) for seen, own in pairs]


def _convolve(rows: Tensor, matrix: Tensor) -> Tensor:
    """K * x [H, W, n, O] of rows [H, W, n, 3 C] and the kernel's matrix [9 C, O]."""
    above, level, below = matrix.chunk(3)
    y = rows @ level
    upper, _, lower = _seen(rows, y)
    upper[1].addmm_(upper[0], above)
    lower[1].addmm_(lower[0], below)
    return y


def _convolve_backward(deltas: Tensor, matrix: Tensor) -> Tensor:
    """∂x [H, W, n, C] of ∂y [H, W, n, O]."""
    above, level, below = matrix.chunk(3)
    rows = deltas @ level.T
    upper, _, lower = _seen(rows, deltas)
    upper[0].addmm_(upper[1], above.T)
    lower[0].addmm_(lower[1], below.T)
    left, own, right = rows.chunk(3, dim=3)
    x = own.contiguous()
    x[:, :-1] += left[:, 1:]
    x[:, 1:] += right[:, :-1]
    return x


class _Normalised(NamedTuple):
    """What lies behind a convolution, and what the way back needs of it."""

    y: Tensor  # as it came [H, W, n, O]
    means: Tensor  # over the pixels [n, O]
    offset: Tensor  # b − m [n, O]
    factor: Tensor  # r [n, O]
    scale: Tensor  # γ [O]
    highest: Tensor  # y + b − m where γ ŷ + β is largest [H // 2, W // 2, n, O]
    places: Tensor  # where that is: PyTorch's indices
    out: Tensor  # [H // 2, W // 2, n, O]


def _normalise(y: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> _Normalised:
    """Bias, normalisation, pooling and ReLU of y [H, W, n, O]."""
    moments = torch.batch_norm_update_stats(_image(y), None, None, 0.0)
    means, variances = (moment.view(y.shape[2:]) for moment in moments)
    offset = bias - _group_mean(means + bias)
    factor = (_group_mean(variances + (means + offset).square()) + _EPSILON).rsqrt_()
    signs = torch.ones_like(scale).copysign(scale)
    falling = bool((scale < 0).any())
    highest, places = _pool(_image(y * signs if falling else y), *_WINDOW)
    highest = _pixels(highest, y)
    highest = torch.addcmul(offset, highest, signs) if falling else highest.add_(offset)
    out = torch.addcmul(shift, highest, factor * scale).relu_()
    return _Normalised(y, means, offset, factor, scale, highest, places, out)


def _normalise_backward(block: _Normalised, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """∂y [H, W, n, O], and those of b, γ and β, of the gradient for `block.out`."""
    y, factor, scale = block.y, block.factor, block.scale
    gradient = _where_positive(block.out, gradient)
    pixels = y.shape[0] * y.shape[1]
    shift = gradient.sum(dim=(0, 1))
    along = (gradient * block.highest).sum(dim=(0, 1)).mul_(factor)
    steepness = factor * scale
    # ∂y = γ r G + slope · y + constant
    slope = _group_mean(along * scale) * factor.square() / -pixels
    constant = _group_mean(shift * scale) * factor / -pixels + slope * block.offset
    bias = (steepness * shift + pixels * (slope * block.means + constant)).sum(dim=0)
    gradient = _image(gradient.mul_(steepness))
    placed = _pool_backward(gradient, _image(y), *_WINDOW, [0, 0], [1, 1], False, block.places)
    moved = _pixels(placed, y).addcmul_(y, slope).add_(constant)
    return moved, [bias, along.sum(dim=0), shift.sum(dim=0)]


def _image(pixels: Tensor) -> Tensor:
    """[H, W, n, C] as one image [1, n C, H, W] with a pixel's channels adjacent."""
    return pixels.flatten(2)[None].permute(0, 3, 1, 2)


def _pixels(image: Tensor, like: Tensor) -> Tensor:
    """The reverse, with the examples and channels of `like`."""
    return image[0].permute(1, 2, 0).unflatten(2, like.shape[2:])


def _group_mean(values: Tensor) -> Tensor:
    """[n, O]: in the place of each channel the mean of its group."""
    grouped = values.view(len(values), _GROUPS, -1)
    return grouped.mean(dim=2, keepdim=True).expand_as(grouped).flatten(1)


def _where_positive(condition: Tensor, values: Tensor) -> Tensor:
    """The values where `condition` > 0, else 0; on unpredictable masks torch.where is slower."""
    result: Tensor = torch.ops.aten.threshold_backward(values, condition, 0)
    return result
