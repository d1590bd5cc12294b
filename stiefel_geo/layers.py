"""Layer of each parameter of a patched model, as timm groups the layers of the plain one."""

from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from .attention.state_dicts import frame_rows_by_prefix, plain_key


def plain_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter → its name in the unpatched model; frames, cores and rest are "….weight" there."""
    plain = {prefix: plain_key(prefix) for prefix in frame_rows_by_prefix(model)}
    names = {}
    for name, _ in model.named_parameters():
        prefix = name.rpartition(".")[0] + "."
        names[name] = plain.get(prefix, name)
    return names


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Layer of each parameter by name: that of the plain weight in timm's grouping of the unpatched model.

    The timm model is the outermost module with a `group_matcher`; what a wrapper adds to it is in the last layer,
    with the head.
    """
    # timm takes half a second to import, and models without layer decay do without it.
    from timm.models._manipulate import group_with_matcher
    from timm.optim._param_groups import auto_group_layers

    prefix, inner = _with_matcher(model)
    plain = {name: short.removeprefix(prefix) for name, short in plain_names(model).items() if name.startswith(prefix)}
    named = [(name, None) for name in dict.fromkeys(plain.values())]
    layers: dict[str, int]
    if hasattr(inner, "group_matcher"):
        matcher = cast(Any, inner).group_matcher(coarse=False)
        layers = group_with_matcher(iter(named), matcher, reverse=True)
    else:  # what timm asks a model for, with the names that it had before the patch
        unpatched = SimpleNamespace(named_parameters=lambda: named, pretrained_cfg=getattr(inner, "pretrained_cfg", {}))
        layers = auto_group_layers(unpatched)
    last = max(layers.values())
    return {name: layers[plain[name]] if name in plain else last for name, _ in model.named_parameters()}


def _with_matcher(model: nn.Module) -> tuple[str, nn.Module]:
    """The outermost module that has a `group_matcher`, and its prefix; the model itself where there is none."""
    for name, module in model.named_modules():
        if callable(getattr(type(module), "group_matcher", None)):
            return (f"{name}." if name else ""), module
    return "", model
