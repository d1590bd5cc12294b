"""Parameter groups of a model, patched or not: frames, cores, decayed and undecayed parameters."""

from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .patching import cores, frames
from .plain_keys import carriers_of, plain_key

KINDS = ("frames", "cores", "decayed", "undecayed")


def param_groups(model: nn.Module, weight_decay: float, *, layer_decay: float | None = None) -> list[dict[str, Any]]:
    """Groups for `ScaleFreeRiemannianAdam`, or for any torch optimizer on an unpatched model.

        optimizer = ScaleFreeRiemannianAdam(param_groups(model, 0.05), lr=1e-3)

    "frames"     on the Stiefel manifold, where weight decay has no tangent part: 0
    "cores"      the singular values of queries and keys: 0, or decay would switch the attention off
    "undecayed"  biases, norms and what the model's `no_weight_decay()` names: 0, by timm's rules
    "decayed"    everything else: `weight_decay`

    With `layer_decay` each of these is split by layer, as timm groups layers (`group_matcher`), and a group has
    `lr_scale` = layer_decay^(layers above it). timm's schedulers multiply by `lr_scale`; for any other loop call
    `scale_lr_(optimizer)` once. The optimizer refuses to step while neither has happened.
    Frozen parameters are in no group. A timm model inside a wrapper (DDP, torch.compile, LightningModule) is found.
    """
    kinds = _kinds(model, weight_decay)
    layers = None if layer_decay is None else _layers(model)
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for name, p in _trained(model):
        layer = layers[name] if layers else 0
        label = f"layer {layer} {kinds[name]}" if layers else kinds[name]
        decay = weight_decay if kinds[name] == "decayed" else 0.0
        group = groups.setdefault((layer, kinds[name]), {"name": label, "params": [], "weight_decay": decay})
        group["params"].append(p)
    ordered = sorted(groups, key=lambda key: (key[0], KINDS.index(key[1])))
    if layers and layer_decay is not None:
        top = max(layers.values())
        for layer, kind in ordered:
            groups[layer, kind]["lr_scale"] = layer_decay ** (top - layer)
    return [groups[key] for key in ordered]


def scale_lr_(optimizer: Optimizer) -> None:
    """Put every group's `lr_scale` into its lr, once, for loops without one of timm's schedulers.

    Call it before a scheduler is built: torch's schedulers then keep the ratios between groups.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group.pop("lr_scale", 1.0)


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def plain_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter → its name in the unpatched model; frames, cores and rest are "….weight" there."""
    plain = {prefix: plain_key(prefix) for prefix in carriers_of(model)}
    names = {}
    for name, _ in model.named_parameters():
        prefix = name.rpartition(".")[0] + "."
        names[name] = plain.get(prefix, name)
    return names


def _kinds(model: nn.Module, weight_decay: float) -> dict[str, str]:
    """Kind of each trained parameter by name."""
    special = {name: "frames" for name, _ in frames(model)} | {name: "cores" for name, _ in cores(model)}
    kept = [prefix + pattern for prefix, listed in _topmost(model, "no_weight_decay") for pattern in listed()]
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


def _layers(model: nn.Module) -> dict[str, int]:
    """Layer of each parameter by name, as timm groups them."""
    from .integrations.timm_optim import layer_numbers  # lazy: imports go one way

    return layer_numbers(model)
