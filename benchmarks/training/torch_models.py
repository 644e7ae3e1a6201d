"""The models of `models.py` in PyTorch, in two halves; needs PyTorch and nothing of ours."""

from __future__ import annotations

import torch
from torch import nn


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
