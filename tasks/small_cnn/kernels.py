"""Loops over the activations of the small convolutional network, compiled by Numba.

Activations lie as [pixels, k]: the k = n C examples and channels of a pixel are adjacent, so that
the inner loops are vectorised. Pixels count row by row. Every array has one dtype, that of the
parameters. The mathematics is at the head of gradient.py.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

EPSILON = 1e-5  # GroupNorm's own

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_Array = np.ndarray[Any, Any]


def _compiled(kernel: _Kernel) -> _Kernel:
    """The kernel in machine code, kept for the next process where there is a place for it.

    Sums may be added up in any order; values that are not finite stay what they are.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    }
    try:
        return cast(_Kernel, njit(cache=True, **options)(kernel))
    except RuntimeError:  # neither beside this file nor in the user's own cache folder
        return cast(_Kernel, njit(**options)(kernel))


@_compiled
def windows(x: _Array, padded: _Array, out: _Array) -> None:
    """What each pixel's 3x3 window sees of images x [n, C, H, W]: out [9 C, H, W, n].

    `padded` [C, H + 2, W + 2, n] is room to work in, with a border of zeros.
    """
    n, channels, height, width = x.shape
    for c in range(channels):
        for i in range(height):
            for e in range(n):
                for j in range(width):
                    padded[c, i + 1, j + 1, e] = x[e, c, i, j]
    for row in range(3):
        for column in range(3):
            for c in range(channels):
                into = out[(3 * row + column) * channels + c]
                for i in range(height):
                    into[i] = padded[c, i + row, column : column + width]


@_compiled
def with_neighbours(x: _Array, out: _Array) -> None:
    """Each pixel's left neighbour, itself and the right one: out [H, W, n, 3 C] of [H, W, n, C]."""
    height, width, n, channels = x.shape
    for i in range(height):
        for j in range(width):
            for side in range(3):
                seen = j + side - 1
                for e in range(n):
                    into = out[i, j, e]
                    if 0 <= seen < width:
                        for c in range(channels):
                            into[side * channels + c] = x[i, seen, e, c]
                    else:
                        for c in range(channels):
                            into[side * channels + c] = 0


@_compiled
def from_neighbours(rows: _Array, out: _Array) -> None:
    """The reverse for gradients: out [H, W, n, C], each pixel's sum over where it was seen."""
    height, width, n, channels = out.shape
    for i in range(height):
        for j in range(width):
            for e in range(n):
                into, own = out[i, j, e], rows[i, j, e]
                for c in range(channels):
                    into[c] = own[channels + c]
                if j + 1 < width:
                    right = rows[i, j + 1, e]
                    for c in range(channels):
                        into[c] += right[c]
                if j > 0:
                    left = rows[i, j - 1, e]
                    for c in range(channels):
                        into[c] += left[2 * channels + c]


@_compiled
def _moments(y: _Array, means: _Array, variances: _Array) -> None:
    """Over the pixels of y [p, k], each column about one of its own values: [k] both."""
    near = y[len(y) // 2]
    means[:] = 0
    variances[:] = 0
    for p in range(len(y)):
        row = y[p]
        for k in range(len(row)):
            value = row[k] - near[k]
            means[k] += value
            variances[k] += value * value
    for k in range(len(near)):
        means[k] /= len(y)
        variances[k] = variances[k] / len(y) - means[k] * means[k]
        means[k] += near[k]


@_compiled
def normalise(
    y: _Array,
    width: int,
    groups: int,
    norm: _Array,
    facts: _Array,
    highest: _Array,
    out: _Array,
) -> None:
    """Bias, normalisation, pooling and ReLU of y [p, k], images of `width` pixels a row.

    `groups` of channels are normalised together; `norm` [3, C] is b, γ and β. Written for the way
    back: `facts` [4, k], for each column its mean m over the pixels, the offset b − m of its group,
    r, and the sign of γ; `highest` [p', k], the value y + offset that won each window, and `out`
    [p', k] behind it.
    """
    bias, scale, shift = norm[0], norm[1], norm[2]
    means, offset, factor, sign = facts[0], facts[1], facts[2], facts[3]
    zero = y.dtype.type(0)
    channels, columns = len(bias), len(means)
    size = channels // groups
    gain, add, variances = np.empty_like(means), np.empty_like(means), np.empty_like(means)
    _moments(y, means, variances)
    for first in range(0, columns, size):
        base = first % channels
        mean, variance = zero, zero
        for c in range(size):
            mean += means[first + c] + bias[base + c]
        mean /= size
        for c in range(size):
            own = bias[base + c] - mean
            offset[first + c] = own
            variance += variances[first + c] + (means[first + c] + own) ** 2
        inverse = 1 / np.sqrt(variance / size + EPSILON)
        for c in range(size):
            factor[first + c] = inverse
            gain[first + c] = inverse * scale[base + c]
            add[first + c] = shift[base + c]
            sign[first + c] = -1 if scale[base + c] < 0 else 1
    pooled = width // 2
    for q in range(len(out)):
        p = q // pooled * 2 * width + q % pooled * 2
        one, two, three, four = y[p], y[p + 1], y[p + width], y[p + width + 1]
        won, into = highest[q], out[q]
        for k in range(columns):
            s = sign[k]
            upper, lower = max(one[k] * s, two[k] * s), max(three[k] * s, four[k] * s)
            value = max(upper, lower) * s + offset[k]
            won[k] = value
            scaled = value * gain[k] + add[k]
            # In this order, so that what is no number stays none.
            into[k] = zero if scaled <= zero else scaled


@_compiled
def normalise_backward(
    y: _Array,
    width: int,
    groups: int,
    norm: _Array,
    facts: _Array,
    highest: _Array,
    out: _Array,
    gradient: _Array,
    moved: _Array,
    sums: _Array,
) -> None:
    """∂y [p, k] into `moved`, of the gradient [p', k] for `out`; `sums` [3, C] grow by ∂b, ∂γ, ∂β.

    The gradient is overwritten. The other arguments are those of `normalise`.
    """
    scale = norm[1]
    means, offset, factor, sign = facts[0], facts[1], facts[2], facts[3]
    zero = y.dtype.type(0)
    channels, columns, pixels = norm.shape[1], len(means), len(y)
    size = channels // groups
    total, along = np.zeros_like(means), np.zeros_like(means)
    for q in range(len(out)):
        own, value, won = gradient[q], out[q], highest[q]
        for k in range(columns):
            kept = zero if value[k] <= zero else own[k]
            own[k] = kept
            total[k] += kept
            along[k] += kept * won[k]
    slope, constant, steep = np.empty_like(means), np.empty_like(means), np.empty_like(means)
    for first in range(0, columns, size):
        base = first % channels
        both, alone = zero, zero
        for c in range(size):
            along[first + c] *= factor[first + c]
            both += along[first + c] * scale[base + c]
            alone += total[first + c] * scale[base + c]
        for c in range(size):
            k, r = first + c, factor[first + c]
            # ∂y = γ r G + slope · y + constant
            slope[k] = -both * r * r / (size * pixels)
            constant[k] = -alone * r / (size * pixels) + slope[k] * offset[k]
            steep[k] = r * scale[base + c]
            sums[0, base + c] += steep[k] * total[k] + pixels * (slope[k] * means[k] + constant[k])
            sums[1, base + c] += along[k]
            sums[2, base + c] += total[k]
    _spread(y, width, sign, slope, constant, steep, gradient, moved)


@_compiled
def _spread(
    y: _Array,
    width: int,
    sign: _Array,
    slope: _Array,
    constant: _Array,
    steep: _Array,
    gradient: _Array,
    moved: _Array,
) -> None:
    """∂y = slope · y + constant, and where a pixel won its window steep · gradient besides."""
    columns, pooled = len(sign), width // 2
    height = len(y) // width
    winner, step = np.empty_like(sign), np.empty_like(sign)
    zero, first, second = sign.dtype.type(0), sign.dtype.type(1), sign.dtype.type(2)
    third = sign.dtype.type(3)
    for q in range(len(gradient)):
        p = q // pooled * 2 * width + q % pooled * 2
        one, two, three, four = y[p], y[p + 1], y[p + width], y[p + width + 1]
        own = gradient[q]
        # Short loops with few arrays each: what they may share in memory is checked before each
        # of them, and the compiler gives up vectorising where that is too much. Of equal pixels
        # the first wins, as in PyTorch.
        for k in range(columns):
            s = sign[k]
            upper, lower = max(one[k] * s, two[k] * s), max(three[k] * s, four[k] * s)
            above = zero if one[k] * s >= two[k] * s else first
            below = second if three[k] * s >= four[k] * s else third
            winner[k] = above if upper >= lower else below
        for k in range(columns):
            step[k] = own[k] * steep[k]
        for place in range(4):
            at = p + place // 2 * width + place % 2
            seen, into, this = y[at], moved[at], sign.dtype.type(place)
            for k in range(columns):
                given = step[k] if winner[k] == this else zero
                into[k] = seen[k] * slope[k] + constant[k] + given
    # A last row or column that no window covers.
    for p in range(len(y)):
        if p // width >= height // 2 * 2 or p % width >= 2 * pooled:
            seen, into = y[p], moved[p]
            for k in range(columns):
                into[k] = seen[k] * slope[k] + constant[k]


# A call costs more than its loops may: other threads cannot take their turn in Python while it is
# prepared. So each way into a layer and out of it is one call; what `normalise` and its way back
# take comes as a tuple.


@_compiled
def normalise_to_rows(arguments: tuple[Any, ...], pooled: _Array, rows: _Array) -> None:
    """`normalise`, then `with_neighbours` of `pooled` [H, W, n, C], a view of its `out`."""
    normalise(*arguments)
    with_neighbours(pooled, rows)


@_compiled
def normalise_to_features(arguments: tuple[Any, ...], pooled: _Array, features: _Array) -> None:
    """`normalise`, then its `out` as features [n, C, p']; `pooled` [p', n, C] is a view of it."""
    normalise(*arguments)
    # Ten times as fast as NumPy's assignment in this direction.
    for e in range(features.shape[0]):
        for p in range(features.shape[2]):
            for c in range(features.shape[1]):
                features[e, c, p] = pooled[p, e, c]


@_compiled
def normalise_backward_from_rows(rows: _Array, below: _Array, arguments: tuple[Any, ...]) -> None:
    """`from_neighbours` into `below`, then `normalise_backward` of a `gradient` that views it."""
    from_neighbours(rows, below)
    normalise_backward(*arguments)


@_compiled
def normalise_backward_from_features(
    features: _Array, below: _Array, arguments: tuple[Any, ...]
) -> None:
    """The same of a gradient for the features [n, C, p'], with `below` [p', n, C]."""
    for p in range(below.shape[0]):
        for e in range(below.shape[1]):
            for c in range(below.shape[2]):
                below[p, e, c] = features[e, c, p]
    normalise_backward(*arguments)


@_compiled
def classify(
    hidden: _Array,
    matrix: _Array,
    bias: _Array,
    y: _Array,
    weights: _Array,
    deltas: _Array,
    matrix_moved: _Array,
    bias_moved: _Array,
    hidden_bias_moved: _Array,
) -> float:
    """Σ_j weights_j · cross-entropy of image j, labelled y_j [n], in float64.

    The logits are `matrix` [classes, u] times ReLU(`hidden` [n, u]), plus `bias`. `hidden` becomes
    its own ReLU and `deltas` [n, u] the loss's gradient for it; the gradients for the last matrix
    and bias, and for the bias of the layer before, are added to what the last three arrays hold.
    Raises IndexError for a label that is no class.
    """
    total = 0.0
    classes, units = matrix.shape
    row = np.empty_like(bias)
    zero = bias.dtype.type(0)
    for j in range(len(hidden)):
        # Nothing else would notice: compiled code reads and writes whatever lies there.
        if not 0 <= y[j] < classes:
            raise IndexError("a label is not one of the classes")
        own, below, weight = hidden[j], deltas[j], weights[j]
        for u in range(units):
            own[u] = zero if own[u] <= zero else own[u]
            below[u] = zero
        for c in range(classes):
            column = matrix[c]
            logit = bias[c]
            for u in range(units):
                logit += column[u] * own[u]
            row[c] = logit
        highest = row.max()
        chosen = row[y[j]] - highest
        summed = zero
        for c in range(classes):
            row[c] = np.exp(row[c] - highest)
            summed += row[c]
        total += float(weight) * (np.log(float(summed)) - float(chosen))
        for c in range(classes):
            row[c] *= weight / summed
        row[y[j]] -= weight
        for c in range(classes):
            step, column, moved = row[c], matrix[c], matrix_moved[c]
            bias_moved[c] += step
            for u in range(units):
                moved[u] += step * own[u]
            for u in range(units):
                below[u] += step * column[u]
        for u in range(units):
            kept = zero if own[u] <= zero else below[u]
            below[u] = kept
            hidden_bias_moved[u] += kept
    return total
