"""The character LSTM of the text tasks: the next character after a string."""

import math
import re

import torch
from torch import Tensor, nn

_EMBEDDING = 8
_LAYERS = 2
_USUAL_HIDDEN = 256
_NAME = re.compile(r"char-lstm(-[1-9][0-9]{0,3})?")


class CharLSTM(nn.Module):
    """Embedding of 8, two LSTM layers, and a dense layer on the last state: logits
    [n, characters] from character numbers, any integer type, [n, length]."""

    # vmap cannot do LSTM layers.
    batching = "loop"

    def __init__(self, characters: int, hidden: int = _USUAL_HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, _EMBEDDING)
        self.lstm = nn.LSTM(_EMBEDDING, hidden, _LAYERS, batch_first=True)
        self.output = nn.Linear(hidden, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Logits [n, characters] of the character that follows each row of text [n, length]."""
        states, _ = self.lstm(self.embedding(text.to(torch.int64)))
        logits: Tensor = self.output(states[:, -1])
        return logits


def build_char_lstm(
    name: str,
    input_shape: tuple[int, ...],  # noqa: ARG001 (strings of any length)
    num_classes: int,
    seed: int,
) -> nn.Module:
    """A float32 CharLSTM over ``num_classes`` characters: ``char-lstm`` has 256 hidden units a
    layer, ``char-lstm-16`` has 16.

    Weights and biases are uniform within ±1/sqrt(hidden), the embedding is N(0, 1): PyTorch's
    defaults, from a generator of their own that is seeded by ``seed``.

    Raises ValueError for another name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"model {name!r} is unknown: allowed are char-lstm and char-lstm-HIDDEN")
    hidden = int(name.split("-")[2]) if name.count("-") == 2 else _USUAL_HIDDEN
    # On the meta device the layers' constructors draw nothing from the global generator.
    with torch.device("meta"):
        module = CharLSTM(num_classes, hidden)
    module.to_empty(device="cpu")
    generator, bound = torch.Generator().manual_seed(seed), 1 / math.sqrt(hidden)
    nn.init.normal_(module.embedding.weight, generator=generator)
    for layer in (module.lstm, module.output):
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return module
