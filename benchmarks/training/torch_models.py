"""The models of `sized_models.py` in PyTorch, as parts; needs PyTorch and nothing of ours."""

from __future__ import annotations

from typing import Any

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


class Normalized(nn.Sequential):
    """A convolution with batch normalization and, but for `last=None`, ReLU."""

    def __init__(self, before: int, after: int, dims: int = 2, last: object = nn.ReLU) -> None:
        convolution, norm = (getattr(nn, f"{kind}{dims}d") for kind in ("Conv", "BatchNorm"))
        parts = [convolution(before, after, 3, padding=1, bias=False), norm(after)]
        super().__init__(*parts, *([nn.ReLU()] if last else []))


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization, and a skip."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        one, two = Normalized(filters, filters), Normalized(filters, filters, last=None)
        self.inner = nn.Sequential(one, two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.inner(x) + x)


class Down(nn.Module):
    """Halves an image; what came in is a skip."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2)

    def forward(self, x: torch.Tensor, *skips: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.pool(x), x, *skips


class Up(nn.Module):
    """Doubles an image and takes the last skip beside it."""

    def forward(
        self, x: torch.Tensor, skip: torch.Tensor, *skips: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1), *skips


def gpt_parts(blocks: int, vocabulary: int, width: int, heads: int) -> list[nn.Module]:
    """Parts of the decoder stack of `largest.py`."""
    parts = [Tokens(vocabulary, width), *(CausalBlock(width, heads) for _ in range(blocks))]
    return [*parts, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary), LastFirst())]


def residual_parts(blocks: int, filters: int) -> list[nn.Module]:
    """Parts of the residual CNN of `largest.py`."""
    parts = [Normalized(3, filters), *(ResidualBlock(filters) for _ in range(blocks))]
    return [*parts, nn.Sequential(Mean(2, 3), nn.Linear(filters, 10))]


def unet_parts(blocks: int, filters: int, dims: int) -> list[nn.Module]:
    """Parts of the U-Nets of `largest.py`."""

    def level(before: int, after: int) -> list[nn.Module]:
        more = (Normalized(after, after, dims) for _ in range(blocks))
        return [Normalized(before, after, dims), *more]

    down = [*level(3, filters), Down(dims), *level(filters, 2 * filters), Down(dims)]
    bottom = [*level(2 * filters, 2 * filters), Up()]
    up = [*level(4 * filters, filters), Up(), *level(2 * filters, filters)]
    return [*down, *bottom, *up, getattr(nn, f"Conv{dims}d")(filters, 10, 1)]


class Stage(nn.Module):
    """Parts one after the other; what is repeated may run again in the backward pass."""

    def __init__(self, parts: list[nn.Module], again: bool) -> None:
        super().__init__()
        self.parts, self.again = nn.ModuleList(parts), again

    def forward(self, x: torch.Tensor, *skips: torch.Tensor) -> Any:
        # Messages take only tensors whose numbers lie in a row.
        for each in (x, *skips):
            if each.requires_grad:
                each.register_hook(torch.Tensor.contiguous)
        for part in self.parts:
            if isinstance(part, Down | Up):
                x, *skips = part(x, *skips)
            elif self.again and isinstance(part, CausalBlock | ResidualBlock | Normalized):
                x = checkpoint(part, x, use_reentrant=False)
            else:
                x = part(x)
        made = [each.contiguous() for each in (x, *skips)]
        return tuple(made) if skips else made[0]
