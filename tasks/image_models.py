"""AlexNet and ResNet-18 for small images, with GroupNorm (Zhang et al., sections 2.2 and 4).

GroupNorm in place of BatchNorm, whose running statistics are no parameters and differ by client.
"""

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn

_GROUPS = 32
_SMALLEST = 16


class AlexNet(nn.Sequential):
    """Five 3x3 convolutions (64, 192, 384, 256, 256 channels), each with GroupNorm and ReLU, the
    first with stride 2, max pooling after the first, second and last, and a dense layer of 1024:
    3.3 million parameters for ten classes, as in the paper's Tables 2 and 3.
    """

    batching = "loop"

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        widths = [check_image(input_shape, "alexnet")[0], 64, 192, 384, 256, 256]
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            stride = 2 if number == 1 else 1
            layers[f"conv{number}"] = nn.Conv2d(before, after, 3, stride=stride, padding=1)
            layers[f"norm{number}"] = nn.GroupNorm(_GROUPS, after)
            layers[f"relu{number}"] = nn.ReLU()
            if number in (1, 2):
                layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers["pool5"] = nn.AdaptiveMaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        layers["dense"] = nn.Linear(4 * widths[-1], 1024)
        layers["relu6"] = nn.ReLU()
        layers["output"] = nn.Linear(1024, num_classes)
        super().__init__(layers)


class _Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + x), x through a 1x1 convolution where sizes differ."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(_GROUPS, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(before, after, 1, stride=stride, bias=False),
                    norm=nn.GroupNorm(_GROUPS, after),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, after, H / stride, W / stride] from [n, before, H, W]."""
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.shortcut(x)).relu()


class ResNet18(nn.Sequential):
    """A 3x3 convolution and four pairs of residual blocks (64, 128, 256, 512 channels) for images
    of 32x32 or so: 11.2 million parameters for ten classes (He et al., 2016)."""

    batching = "loop"

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        channels = check_image(input_shape, "resnet-18")[0]
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv=nn.Conv2d(channels, 64, 3, padding=1, bias=False),
            norm=nn.GroupNorm(_GROUPS, 64),
            relu=nn.ReLU(),
        )
        before = 64
        for stage, after in enumerate((64, 128, 256, 512), start=1):
            layers[f"block{stage}a"] = _Block(before, after, 1 if stage == 1 else 2)
            layers[f"block{stage}b"] = _Block(after, after, 1)
            before = after
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["output"] = nn.Linear(512, num_classes)
        super().__init__(layers)


def check_image(input_shape: tuple[int, ...], model: str) -> tuple[int, ...]:
    """The shape itself. Raises ValueError for what is no image, or too small a one."""
    if len(input_shape) != 3 or min(input_shape[1:]) < _SMALLEST:
        raise ValueError(
            f"model {model!r} cannot take inputs of shape {tuple(input_shape)}: allowed are "
            f"(channels, height, width) with height and width of at least {_SMALLEST}"
        )
    return input_shape
