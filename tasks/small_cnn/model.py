"""A small convolutional network, whose gradient is known in closed form."""

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blackthorn.tasks.small_cnn import FIRST, GROUPS, HIDDEN, SECOND

if TYPE_CHECKING:
    from blackthorn.tasks.small_cnn.gradient import GradientBuffers


class ChannelsLast(nn.Module):
    """The same images [n, C, H, W] with a pixel's channels adjacent in memory, which PyTorch's
    pooling on a CPU needs to be vectorised.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself in value and shape."""
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
    compiled = False

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        channels, height, width = input_shape
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, FIRST, 3, padding=1),
                layout1=ChannelsLast(),
                norm1=nn.GroupNorm(GROUPS, FIRST),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(FIRST, SECOND, 3, padding=1),
                norm2=nn.GroupNorm(GROUPS, SECOND),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                dense=nn.Linear(SECOND * (height // 4) * (width // 4), HIDDEN),
                relu3=nn.ReLU(),
                output=nn.Linear(HIDDEN, num_classes),
            )
        )
        self._workspace: GradientBuffers | None = None

    def analytic_loss_and_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Cross-entropies [B] and their gradients [B, d], one client after the other; see
        FlatModel and gradient.py. None unless `compiled`, and on other devices."""
        if not self.compiled or params.device.type != "cpu":
            return None
        # Numba, which takes as long to import as all the rest.
        from blackthorn.tasks.small_cnn.gradient import GradientBuffers

        if self._workspace is None:
            self._workspace = GradientBuffers()
        losses, gradients = params.new_empty(len(params)), torch.empty_like(params)
        for client, into in enumerate(gradients):
            losses[client] = self._workspace.gradient(
                params[client], x[client], y[client], weights[client], into
            )
        return losses, gradients
