"""One attention class of timm on a small architecture: the model, its images, and its heads cut by hand."""

import re
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

from stiefel_geo.attention.layouts import class_name

from .patch_cases import randomise_


@dataclass(frozen=True)
class Case:
    cls: str  # below "timm."
    architecture: str
    size: int
    overrides: dict[str, Any]
    rows: dict[str, str]

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The architecture with randomised weights and attention strong enough to show in the output."""
        torch.manual_seed(0)
        model = randomise_(timm.create_model(self.architecture, num_classes=4, **self.overrides))
        return model.to(dtype).eval()

    def with_something_between(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The same with another scale behind every layer: a subclass of Linear, and a hook."""
        model = self.model(dtype)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.register_forward_hook(scale_channels)
            if type(module) is nn.Linear:
                module.__class__ = ScaledLinear
        return model

    def images(self, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(2, 3, self.size, self.size, generator=generator, dtype=torch.float64).to(dtype)

    def first(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Name and first module of the class."""
        return next((n, m) for n, m in model.named_modules() if class_name(type(m)) == f"timm.{self.cls}")


def scale_channels(module: nn.Linear | nn.Conv2d, args: object, output: Tensor) -> Tensor:
    """Another factor for every row of the weight, as a hook."""
    rows = module.weight.shape[0]
    factors = 1 + 0.3 * torch.linspace(-1, 1, rows, dtype=output.dtype, device=output.device)
    return output * (factors if isinstance(module, nn.Linear) else factors.view(-1, 1, 1))


class ScaledLinear(nn.Linear):
    """As SSF and adapters that subclass Linear do: the output is not the product alone."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.8 * super().forward(x) + 0.1


def heads(weight: Tensor, spec: str) -> list[tuple[str, Tensor]]:
    """(role, rows) of every head in the order of the weight's rows; other rows have their own word as role."""
    repeat = int(spec.split(" * ")[0]) if " * " in spec else 1
    words = re.findall(r"(\w+) (?:(\d+)x)?(\d+)", spec.split(" * ")[-1])
    pieces = [(role, int(width)) for role, count, width in words for _ in range(int(count or 1))] * repeat
    cut = weight.detach().flatten(1).split([width for _, width in pieces])
    return [(role, piece) for (role, _), piece in zip(pieces, cut, strict=True)]
