"""The models that are trained: logistic regression, multi-layer perceptrons, a small CNN."""

import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from blackthorn.settings.own_code import in_one_line, is_own_code, own_function
from blackthorn.tasks.image_models import AlexNet, ResNet18
from blackthorn.tasks.small_cnn.model import SmallCNN

MODEL_NAMES = ("logistic", "mlp-H[-H...]", "cnn", "alexnet", "resnet-18")
_MLP = re.compile(r"mlp(-[1-9][0-9]{0,5})+")


class SoftmaxRegression(nn.Sequential):
    """Logits W x + b [n, C] of flattened inputs, whose cross-entropy has a gradient in closed form.

    For the cross-entropy alone: the gradient is not that of another loss.
    """

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__(OrderedDict(flatten=nn.Flatten(), output=nn.Linear(inputs, num_classes)))
        self._classes = num_classes

    def analytic_loss_and_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropies [B] and their gradients [B, d], w = (W, b) row by row; see FlatModel.

        ∇_W = Σ_j weights_j (softmax(W x_j + b) − e_{y_j}) x_jᵀ, and ∇_b the same without x.
        """
        inputs = x.flatten(2)
        classes = self._classes
        matrix, bias = params.split([inputs.shape[2] * classes, classes], dim=1)
        matrix = matrix.view(len(params), classes, -1)
        logits = torch.baddbmm(bias[:, None], inputs, matrix.transpose(1, 2))
        logs = torch.log_softmax(logits, dim=2)
        losses = -(weights * logs.gather(2, y[:, :, None])[:, :, 0]).sum(dim=1)
        residuals = logs.exp().scatter_add_(2, y[:, :, None], -torch.ones_like(logs[:, :, :1]))
        residuals *= weights[:, :, None]
        gradients = torch.empty_like(params)
        torch.bmm(
            residuals.transpose(1, 2), inputs, out=gradients[:, : matrix[0].numel()].view_as(matrix)
        )
        gradients[:, matrix[0].numel() :] = residuals.sum(dim=1)
        return losses, gradients

    def analytic_descent(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        steps: int,
        learning_rate: float,
        weight_decay: float,
        out: Tensor,
    ) -> Tensor | None:
        """``steps`` steps of full-batch descent from ``start`` [d] into ``out`` [B, d]; see
        FlatModel.

        Every gradient R_k X is a combination of the n inputs, so that W_k = s^k W_0 − η S_k X
        with s = 1 − η · weight_decay and S_{k+1} = s S_k + R_k [C, n]: each step needs the n x n
        Gram matrix X Xᵀ alone, and the inputs are read three times in all. None where the Gram
        matrix is more work than the steps it saves.
        """
        inputs = x.flatten(2)
        classes, n = self._classes, inputs.shape[1]
        if n + 2 * classes > 2 * classes * steps:
            return None
        matrix = start[:-classes].view(classes, -1)
        bias = start[-classes:].repeat(len(x), 1)
        # Classes before examples: softmax over the last of a few numbers is seven times slower.
        products = (inputs.flatten(0, 1) @ matrix.T).view(len(x), n, classes)
        products = products.transpose(1, 2).contiguous()
        gram = torch.bmm(inputs, inputs.transpose(1, 2))
        share = weights[:, None]
        targets = torch.zeros_like(products).scatter_(1, y[:, None], share)
        combined, total = torch.zeros_like(products), start.new_zeros(len(x))
        shrink = 1 - learning_rate * weight_decay
        for _ in range(steps):
            logs = torch.log_softmax(products + bias[:, :, None], dim=1)
            total -= (logs * targets).sum(dim=(1, 2))
            residuals = logs.exp_().mul_(share).sub_(targets)
            if weight_decay:
                combined *= shrink
                bias *= shrink
            combined += residuals
            products = torch.baddbmm(products, residuals, gram, beta=shrink, alpha=-learning_rate)
            bias.sub_(residuals.sum(dim=2), alpha=learning_rate)
        # The product into a matrix of its own: rows that are not adjacent would cost a loop.
        moved = torch.bmm(combined, inputs).flatten(1)
        torch.add(
            start[:-classes] * shrink**steps, moved, alpha=-learning_rate, out=out[:, :-classes]
        )
        out[:, -classes:] = bias
        return total


class Perceptron(nn.Sequential):
    """Linear layers of the given widths with ReLU between them, on flattened inputs, whose
    cross-entropy has a gradient in closed form (for that loss alone, as in SoftmaxRegression)."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        widths = [inputs, *hidden, outputs]
        for number, (before, after) in enumerate(pairwise(widths[:-1]), start=1):
            layers[f"hidden{number}"] = nn.Linear(before, after)
            layers[f"relu{number}"] = nn.ReLU()
        layers["output"] = nn.Linear(widths[-2], outputs)
        super().__init__(layers)
        self._shapes = [(after, before) for before, after in pairwise(widths)]

    def analytic_loss_and_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropies [B] and their gradients [B, d]; see FlatModel.

        With the units before the examples, h_0 = Xᵀ [B, p, n]: h_l = ReLU(W_l h_{l-1} + b_l), and
        backwards D_L = (softmax − e_y) · weights, ∇_{W_l} = D_l h_{l-1}ᵀ, ∇_{b_l} = D_l 1 and
        D_{l-1} = W_lᵀ D_l where h_{l-1} > 0, else 0.
        """
        matrices, biases = self._layers(params)
        before = [x.flatten(2).transpose(1, 2)]
        for matrix, bias in zip(matrices, biases, strict=True):
            units = torch.bmm(matrix, before[-1]).add_(bias[:, :, None])
            before.append(units.relu_() if len(before) < len(matrices) else units)
        labels = y[:, None]
        logs = torch.log_softmax(before.pop(), dim=1)
        losses = -(weights * logs.gather(1, labels)[:, 0]).sum(dim=1)
        deltas = logs.exp_().scatter_add_(1, labels, -torch.ones_like(logs[:, :1]))
        deltas *= weights[:, None]
        gradients = torch.empty_like(params)
        into_matrices, into_biases = self._layers(gradients)
        for layer in reversed(range(len(matrices))):
            below = before[layer]
            into_matrices[layer].copy_(torch.bmm(deltas, below.transpose(1, 2)))
            torch.sum(deltas, dim=2, out=into_biases[layer])
            if layer > 0:
                deltas = torch.bmm(matrices[layer].transpose(1, 2), deltas)
                deltas.masked_fill_(below <= 0, 0.0)
        return losses, gradients

    def _layers(self, vectors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the matrices [B, out, in] and the biases [B, out] in ``vectors`` [B, d]."""
        sizes = [size for out, into in self._shapes for size in (out * into, out)]
        parts = vectors.split(sizes, dim=1)
        matrices = [
            part.unflatten(1, shape) for part, shape in zip(parts[::2], self._shapes, strict=True)
        ]
        return matrices, list(parts[1::2])


def build_model(
    name: str, input_shape: tuple[int, ...], num_classes: int, seed: int, variance: float = 2.0
) -> nn.Module:
    """A float32 module from inputs [n, *input_shape] to logits [n, num_classes].

    * ``logistic``: linear with bias, all zeros.
    * ``mlp-25``, ``mlp-200-100``, ...: hidden layers of these widths with ReLU.
    * ``cnn``: SmallCNN, ``alexnet`` and ``resnet-18``: those of tasks/image_models.py, for inputs
      [C, H, W].
    * ``FILE.py:FUNCTION``: what that function makes of (input_shape, num_classes), initialised as
      it does, with torch's global generator seeded by ``seed`` and put back afterwards; clients
      are trained one after the other unless the module's attribute ``batching`` is "vmap".

    Weights of these but ``logistic`` are N(0, ``variance``/fan_in), by default the law for ReLU
    networks (He et al., 2015), from a generator of their own that is seeded by ``seed``; biases
    start at zero.

    Raises ValueError for another name, or a shape that the model cannot take.
    """
    if is_own_code(name):
        return _own_model(name, input_shape, num_classes, seed)
    # On the meta device the layers' constructors draw nothing from the global generator.
    with torch.device("meta"):
        module = _architecture(name, input_shape, num_classes)
    module.to_empty(device="cpu")
    if name == "logistic":
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    else:
        _initialise(module, variance, torch.Generator().manual_seed(seed))
    return module


def _architecture(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    if name == "logistic":
        return SoftmaxRegression(math.prod(input_shape), num_classes)
    if _MLP.fullmatch(name):
        widths = [int(width) for width in name.split("-")[1:]]
        return Perceptron(math.prod(input_shape), widths, num_classes)
    if name == "alexnet":
        return AlexNet(input_shape, num_classes)
    if name == "resnet-18":
        return ResNet18(input_shape, num_classes)
    if name == "cnn":
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise ValueError(
                f"model 'cnn' cannot take inputs of shape {tuple(input_shape)}: allowed are "
                "(channels, height, width) with height and width of at least 4"
            )
        return SmallCNN(input_shape, num_classes)
    known = ", ".join((*MODEL_NAMES, "your own FILE.py:NAME"))
    raise ValueError(f"model {name!r} is unknown: allowed are {known}")


def _own_model(name: str, input_shape: tuple[int, ...], num_classes: int, seed: int) -> nn.Module:
    build = own_function(name)
    blamed = f"model = {name}, on inputs of shape {tuple(input_shape)},"
    with torch.random.fork_rng(devices=[]), in_one_line(blamed):
        torch.manual_seed(seed)
        module = build(input_shape, num_classes)
        logits = _outputs(module, torch.zeros(2, *input_shape))
    if not isinstance(module, nn.Module) or tuple(logits.shape) != (2, num_classes):
        raise ValueError(
            f"model = {name} is not allowed: it must be a torch.nn.Module from inputs [n, "
            f"{', '.join(map(str, input_shape))}] to logits [n, {num_classes}]"
        )
    if not hasattr(module, "batching"):
        object.__setattr__(module, "batching", "loop")  # any layer can do that
    return module


def _outputs(module: Any, x: Tensor) -> Any:
    """Of a look at the shapes, which no running statistic is to see."""
    if not isinstance(module, nn.Module):
        return module(x)
    training = module.training
    try:
        return module.eval()(x)
    finally:
        module.train(training)


def _initialise(module: nn.Module, variance: float, generator: torch.Generator) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            deviation = math.sqrt(variance / layer.weight[0].numel())
            nn.init.normal_(layer.weight, 0.0, deviation, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.GroupNorm):
            layer.reset_parameters()
