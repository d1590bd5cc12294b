"""The model that fine-tuning starts from: any timm architecture, with weights from a file or the hub."""

import copy
import difflib
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from small_vit import ASSET, small_vit
from timm.models import load_state_dict
from torch import Tensor, nn

from .bad_input import BadInput, first_line

SMALL = "small_vit"


def starting_model(name: str, classes: int, size: int | None, checkpoint: Path | None, pretrained: bool) -> nn.Module:
    """Model with `classes` outputs for images of `size` pixels (the architecture's own size by default)."""
    model = _build(name, classes, size, pretrained)
    _check_patches(name, model, size)
    if checkpoint is not None:
        load_weights(model, name, checkpoint)
    elif name == SMALL:
        head = copy.deepcopy(model.get_submodule("head"))
        load_weights(model, name, ASSET)
        model.head = head  # the asset's own head names CIFAR-10's classes
    return model


def input_size(model: nn.Module, size: int | None) -> int:
    """Side of the images in pixels."""
    if size is not None:
        return size
    embed = getattr(model, "patch_embed", None)
    grid = getattr(embed, "img_size", None)
    return int(grid[0] if grid else _pretrained_cfg(model)["input_size"][-1])


def _pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """What timm knows of the model's weights; most of its models have it."""
    return getattr(model, "pretrained_cfg", None) or {}


def _build(name: str, classes: int, size: int | None, pretrained: bool) -> nn.Module:
    sized: dict[str, Any] = {} if size is None else {"img_size": size}
    if name == SMALL:
        return small_vit(classes, **sized)
    if not timm.is_model(name):
        near = difflib.get_close_matches(name.split(".")[0], timm.list_models(), n=3)
        hint = f"did you mean {', '.join(near)}" if near else "timm.list_models() names them"
        raise BadInput(f"--model must be {SMALL} or a timm model: {name} is none; {hint}?")
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=classes, **sized)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, pretrained=pretrained, num_classes=classes)  # takes images of any size
    except Exception as error:  # whatever timm, the hub and the network raise
        source = "; without a network give the weights by --checkpoint FILE" if pretrained else ""
        raise BadInput(f"timm cannot build {name} at --img-size {size}: {first_line(error)}{source}") from error


def _check_patches(name: str, model: nn.Module, size: int | None) -> None:
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if size is None or patch is None or size % patch[0] == 0:
        return
    near = max(1, round(size / patch[0])) * patch[0]
    raise BadInput(f"the patch size must divide --img-size: {name} has {patch[0]}, got {size}; try {near}")


def load_weights(model: nn.Module, name: str, path: Path) -> None:
    """Load the file through the architecture's own `checkpoint_filter_fn`, a head of other classes excepted."""
    if not path.is_file():
        raise BadInput(f"--checkpoint must be a file: {path} is none; check the path")
    try:
        state = load_state_dict(str(path))
        adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        state = adapt(state, model) if adapt else state
        state = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    except Exception as error:  # whatever a truncated, foreign or hostile file makes the readers raise
        raise BadInput(
            f"--checkpoint must be a whole file of timm weights for {name}: {path} cannot be read "
            f"({first_line(error)}); fetch it again"
        ) from error
    _check_shapes(model, name, path, state)
    model.load_state_dict(state, strict=False)


def _check_shapes(model: nn.Module, name: str, path: Path, state: dict[str, Tensor]) -> None:
    """File and model must agree in every weight but the head's; drops a head of another shape."""
    heads = _pretrained_cfg(model).get("classifier") or ()
    heads = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
    needed = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    for key in [*needed, *(key for key in found if key not in needed)]:
        if needed.get(key) == found.get(key):
            continue
        if not key.startswith(heads):
            raise BadInput(
                f"--checkpoint must hold the weights of {name}: {key} has shape {needed.get(key, 'none')} in the "
                f"model and {found.get(key, 'none')} in {path}; give --model and --img-size as it was trained"
            )
        state.pop(key, None)


def largest_gap(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest entry of `one`."""
    return float((one - other).abs().max() / one.abs().max().clamp_min(torch.finfo(one.dtype).tiny))
