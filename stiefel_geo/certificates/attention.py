"""A timm attention layer with a loss, the ground for propositions 5 and 6."""

from typing import Any

import torch
from torch import Tensor, nn

from .certificate import Case, gaussian

Layer = Any  # timm.layers.Attention, which is not imported before it is used
TOKENS = (4, 12)  # sequences in a batch, tokens in each


def attention(case: Case, generator: torch.Generator, **options: Any) -> Layer:
    """timm's `Attention` of width d with heads of width r, float64, its weights drawn from `generator`."""
    from timm.layers.attention import Attention  # here, so that importing stiefel_geo does not import timm

    layer = Attention(case.d, num_heads=case.d // case.r, **options).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(gaussian(*p.shape, generator=generator) / case.d**0.5)
    return layer


def heads(layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key rows of a tensor shaped like the layer's qkv weight or bias, as views (heads, d or 1, r)."""
    query, key, _ = rows.view(3, layer.num_heads, -1, rows[0].numel())
    return query.mT, key.mT


def data(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets (sequences, tokens, d)."""
    x, y = gaussian(2, *TOKENS, case.d, generator=generator)
    return x, y


def backward(layer: Layer, x: Tensor, y: Tensor) -> None:
    """Gradients of the mean squared error."""
    layer.zero_grad()
    nn.functional.mse_loss(layer(x), y).backward()
