"""Parameter groups of a model, patched or not: frames, cores, decayed and undecayed parameters."""

from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .attention.patching import cores, frames
from .layers import layer_numbers, plain_names

KINDS = ("frames", "cores", "decayed", "undecayed")


def param_groups(
    model: nn.Module, weight_decay: float, *, layer_decay: float | None = None, frame_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for `ScaleFreeRiemannianAdam`, or for any torch optimizer on an unpatched model.

        optimizer = ScaleFreeRiemannianAdam(param_groups(model, 0.05), lr=1e-3)

    The groups, by their "name", and the weight decay of each:

    - "frames", on the Stiefel manifold, where weight decay has no tangent part: 0
    - "cores", the singular values of queries and keys: 0, or decay would switch the attention off
    - "undecayed", biases, norms and what the model's `no_weight_decay()` names: 0, by timm's rules; in a model
      without that method also tables whose name says bias, as transformers' Trainer has it
    - "decayed", everything else: `weight_decay`

    Frozen parameters are in no group. A timm model inside a wrapper (DDP, torch.compile, LightningModule) is found.
    timm's schedulers multiply by a group's `lr_scale`; for any other loop call `scale_lr_(optimizer)` once. The
    optimizer refuses to step while neither has happened.

    Args:
        model: patched or not.
        weight_decay: of the parameters that are decayed.
        layer_decay: splits each group by layer, as timm groups layers (`group_matcher`), with `lr_scale` =
            layer_decay^(layers above it).
        frame_lr_scale: multiplies the `lr_scale` of frames alone: the k of docs/results.md, which says when it helps.

    Raises:
        ValueError: `frame_lr_scale` is not a positive finite number.
    """
    if not 0 < frame_lr_scale < float("inf"):
        raise ValueError(f"frame_lr_scale must be above 0 and finite; got {frame_lr_scale}.")
    kinds = _kinds(model, weight_decay)
    layers = None if layer_decay is None else layer_numbers(model)
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for name, p in _trained(model):
        layer = layers[name] if layers else 0
        label = f"layer {layer} {kinds[name]}" if layers else kinds[name]
        decay = weight_decay if kinds[name] == "decayed" else 0.0
        group = groups.setdefault((layer, kinds[name]), {"name": label, "params": [], "weight_decay": decay})
        group["params"].append(p)
    ordered = sorted(groups, key=lambda key: (key[0], KINDS.index(key[1])))
    if layers or frame_lr_scale != 1.0:
        top, base = max(layers.values()) if layers else 0, 1.0 if layer_decay is None else layer_decay
        for layer, kind in ordered:
            groups[layer, kind]["lr_scale"] = base ** (top - layer) * (frame_lr_scale if kind == "frames" else 1.0)
    return [groups[key] for key in ordered]


def scale_lr_(optimizer: Optimizer) -> None:
    """Put every group's `lr_scale` into its lr, once, for loops without one of timm's schedulers.

    Call it before a scheduler is built: torch's schedulers then keep the ratios between groups.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group.pop("lr_scale", 1.0)


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _kinds(model: nn.Module, weight_decay: float) -> dict[str, str]:
    """Kind of each trained parameter by name."""
    special = {name: "frames" for name, _ in frames(model)} | {name: "cores" for name, _ in cores(model)}
    lists = dict(_topmost(model, "no_weight_decay"))
    kept = [prefix + pattern for prefix, listed in lists.items() for pattern in listed()] if lists else ["*bias*"]
    plain = plain_names(model)

    def kind(name: str, p: Tensor) -> str:
        undecayed = p.ndim <= 1 or name.endswith(".bias") or _matches(plain[name], kept) or not weight_decay
        return "undecayed" if undecayed else "decayed"

    return {name: special.get(name) or kind(name, p) for name, p in _trained(model)}


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _topmost(model: nn.Module, method: str, prefix: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Prefix and bound method of the outermost modules that have `method`: the timm models inside any wrapper."""
    if callable(getattr(type(model), method, None)):
        yield prefix, getattr(model, method)
        return
    for name, child in model.named_children():
        yield from _topmost(child, method, f"{prefix}{name}.")
