"""The models of `sized_models.py` in PyTorch, as parts; needs PyTorch and nothing of ours."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """What is given, plus what an inner module makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of images, as Keras does it by default."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Self-attention behind a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.attention(y, y, y, need_weights=False)[0]


class Mean(nn.Module):
    """The mean over some dimensions."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dims)


def mlp(width: int = 1024, depth: int = 8) -> list[nn.Module]:
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return [*parts, nn.Linear(width, 10)]


def cnn(filters: int = 64, blocks: int = 6) -> list[nn.Module]:
    parts: list[nn.Module] = [nn.Conv2d(3, filters, 3, padding=1)]
    for _ in range(blocks):
        inner = (ChannelNorm(filters), nn.ReLU(), nn.Conv2d(filters, filters, 3, padding=1))
        parts.append(Residual(nn.Sequential(*inner)))
    return [*parts, Mean(2, 3), nn.Linear(filters, 10)]


def transformer(width: int = 256, blocks: int = 4) -> list[nn.Module]:
    parts: list[nn.Module] = []
    for _ in range(blocks):
        parts.append(Residual(Attention(width, 4)))
        hidden = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        parts.append(Residual(nn.Sequential(*hidden, nn.Linear(4 * width, width))))
    return [*parts, Mean(1), nn.Linear(width, 10)]


MODELS = {
    "mlp": (mlp, 8, (1024,)),
    "cnn": (cnn, 4, (3, 32, 32)),
    "transformer": (transformer, 4, (128, 256)),
}
"""Each model, how many of its parts are the first stage, and the shape of a sample."""


def stages_of(name: str) -> list[nn.Module]:
    """Builds both stages of a model."""
    torch.manual_seed(0)
    build, cut, _ = MODELS[name]
    parts = build()
    return [nn.Sequential(*parts[:cut]), nn.Sequential(*parts[cut:])]


def data_for(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and labels."""
    torch.manual_seed(0)
    return torch.randn(rows, *MODELS[name][2]), torch.randint(0, 10, (rows,))


class Tokens(nn.Module):
    """Vectors for tokens."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class CausalBlock(nn.Module):
    """A block of a decoder, with the attention of PyTorch that keeps no scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        hidden = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LastFirst(nn.Module):
    """Scores with the classes where the loss expects them, behind the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(-1, 1)


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization, and a skip."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        one, two = Normalized(filters, filters), Normalized(filters, filters, last=None)
        self.inner = nn.Sequential(one, two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.inner(x) + x)


class Normalized(nn.Sequential):
    """A convolution with batch normalization and, but for `last=None`, ReLU."""

    def __init__(self, before: int, after: int, last: object = nn.ReLU) -> None:
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(after), *([nn.ReLU()] if last else []))


def gpt_parts(blocks: int, vocabulary: int, width: int, heads: int) -> list[nn.Module]:
    """Parts of the decoder stack of `largest.py`."""
    parts = [Tokens(vocabulary, width), *(CausalBlock(width, heads) for _ in range(blocks))]
    return [*parts, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary), LastFirst())]


def residual_parts(blocks: int, filters: int) -> list[nn.Module]:
    """Parts of the residual CNN of `largest.py`."""
    parts = [Normalized(3, filters), *(ResidualBlock(filters) for _ in range(blocks))]
    return [*parts, nn.Sequential(Mean(2, 3), nn.Linear(filters, 10))]


class Stage(nn.Module):
    """Parts one after the other; blocks may run again in the backward pass."""

    def __init__(self, parts: list[nn.Module], again: bool) -> None:
        super().__init__()
        self.parts, self.again = nn.ModuleList(parts), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            if self.again and isinstance(part, CausalBlock | ResidualBlock):
                x = checkpoint(part, x, use_reentrant=False)
            else:
                x = part(x)
        return x
