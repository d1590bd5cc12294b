"""The examples' default model: a timm VisionTransformer small enough to fine-tune on two CPU cores.

Its architecture, its weights, and `pretrain.py`, which made them.
"""

from pathlib import Path
from typing import Any

import timm
from torch import nn

ASSET = Path(__file__).resolve().with_name("cifar10.safetensors")
ARCHITECTURE = "vit_tiny_patch16_224"
SHAPE: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 128,
    "depth": 5,
    "num_heads": 4,  # five blocks of four query and four key frames on St(128, 32)
    "mlp_ratio": 2,
    "class_token": False,  # averaging the 64 patches learns faster here than a class token does
    "global_pool": "avg",
}


def small_vit(num_classes: int, **changes: Any) -> nn.Module:
    """Untrained default model: 0.68 M parameters, 32 px in patches of 4 px."""
    return timm.create_model(ARCHITECTURE, num_classes=num_classes, **{**SHAPE, **changes})
