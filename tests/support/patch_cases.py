"""Models that the patch tests share: one small model per form of the projections, and randomised weights."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.attention.layouts import find

VIT: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
ROPE: dict[str, Any] = VIT | {"attn_type": "rope", "use_rot_pos_emb": True}

OPTIONS = inspect.signature(Eva).parameters  # older timm lacks some: those forms do not exist there

Build = Callable[[], nn.Module]
M = TypeVar("M", bound=nn.Module)

FORMS: dict[str, Build] = {
    "fused, bias": lambda: VisionTransformer(**VIT),
    "fused, no bias": lambda: VisionTransformer(**VIT, qkv_bias=False),
    "fused, q/k norm": lambda: VisionTransformer(**VIT, qk_norm=True),
    "rope, fused": lambda: Eva(**ROPE),
    "rope, separate": lambda: Eva(**ROPE, qkv_fused=False),
    "eva, q_bias and zero k_bias": lambda: Eva(**VIT, use_rot_pos_emb=True),
    "eva, no bias": lambda: Eva(**VIT, qkv_bias=False),
    "eva, separate": lambda: Eva(**VIT, qkv_fused=False, use_rot_pos_emb=True),
}
if "num_kv_heads" in OPTIONS:
    FORMS["rope, separate, shared keys"] = lambda: Eva(**ROPE, qkv_fused=False, num_kv_heads=1)
if "qk_norm" in OPTIONS:
    FORMS["rope, q/k norm"] = lambda: Eva(**ROPE, qk_norm=True)

each_form = pytest.mark.parametrize("build", FORMS.values(), ids=FORMS.keys())
each_core = pytest.mark.parametrize("core", ["learn", "freeze", "identity"])


def small_vit(**overrides: Any) -> VisionTransformer:
    """A VisionTransformer of two blocks with randomised weights, in eval mode."""
    return randomise_(VisionTransformer(**(VIT | overrides))).eval()


def built(build: Build, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A form with randomised weights, in eval mode."""
    return randomise_(build().to(dtype)).eval()


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention modules that have a layout."""
    return [module for module in model.modules() if find(module) is not None]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def seeded_vit() -> VisionTransformer:
    """A VisionTransformer that is the same in every test, constructor's draws included."""
    torch.manual_seed(0)
    return randomise_(VisionTransformer(**VIT)).eval()


def pair(core: str) -> tuple[VisionTransformer, VisionTransformer]:
    """A patched model and the plain model of the same weights."""
    model = seeded_vit()
    stiefel_geo.patch(model, core=core)
    plain = copy.deepcopy(model)
    stiefel_geo.unpatch(plain)
    return model, plain


@torch.no_grad()
def randomise_(model: M, seed: int = 0) -> M:
    """Biases, norms, BatchNorm statistics, tables and zero-initialised weights away from their neutral values."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 0
        small = parameter.std(correction=0) < 0.05
        parameter.add_(noise(parameter) * (0.3 if fan_in == 0 else fan_in**-0.5 if small else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.3 * noise(buffer))
        elif name.endswith("running_var"):
            buffer.mul_(4 + noise(buffer).square())  # unmatched statistics amplify; keep softmax from saturating
    return model


def images(model: nn.Module, batch: int = 2, size: tuple[int, int, int] = (3, 16, 16)) -> Tensor:
    """Inputs in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, *size, generator=generator, dtype=torch.float64).to(dtype)


def relative(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖/‖reference‖."""
    return float((torch.linalg.vector_norm(value - reference) / torch.linalg.vector_norm(reference)).detach())
