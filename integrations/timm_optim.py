"""timm's optimizer factory and layer decay.

Importing this module registers the optimizer with timm, for `train.py --opt scalefreeradam` and for

    timm.optim.create_optimizer_v2(model, opt="scalefreeradam", lr=1e-3, weight_decay=0.05, layer_decay=0.75)

timm then makes the groups, by names that it takes for the patched model's own: no decay on frames and cores all the
same, since the optimizer knows them; `stiefel_geo.param_groups` gives the same scales and readable names. timm reads
names at "_", so "lookahead_scalefreeradam" is timm's Lookahead around it.
"""

from types import SimpleNamespace
from typing import Any, cast

from timm.models._manipulate import group_with_matcher
from timm.optim._optim_factory import OptimInfo, default_registry
from timm.optim._param_groups import auto_group_layers
from torch import nn

from stiefel_geo.groups import plain_names
from stiefel_geo.optim import ScaleFreeRiemannianAdam

default_registry.register(
    OptimInfo(
        name="scalefreeradam",
        opt_class=ScaleFreeRiemannianAdam,
        description="Riemannian Adam with one scalar second moment per frame; AdamW for Euclidean parameters",
        has_betas=True,
    )
)


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Layer of each parameter by name: that of the plain weight in timm's grouping of the unpatched model.

    The timm model is the outermost module with a `group_matcher`; what a wrapper adds to it is in the last layer,
    with the head.
    """
    prefix, inner = _with_matcher(model)
    plain = {name: short.removeprefix(prefix) for name, short in plain_names(model).items() if name.startswith(prefix)}
    named = [(name, None) for name in dict.fromkeys(plain.values())]
    layers: dict[str, int]
    if hasattr(inner, "group_matcher"):
        matcher = cast(Any, inner).group_matcher(coarse=False)
        layers = group_with_matcher(iter(named), matcher, reverse=True)
    else:  # what timm asks a model for, with the names that it had before the patch
        unpatched = SimpleNamespace(named_parameters=lambda: named, pretrained_cfg=getattr(inner, "pretrained_cfg", {}))
        layers = auto_group_layers(unpatched)  # type: ignore[no-untyped-call]
    last = max(layers.values())
    return {name: layers[plain[name]] if name in plain else last for name, _ in model.named_parameters()}


def _with_matcher(model: nn.Module) -> tuple[str, nn.Module]:
    """The outermost module that has a `group_matcher`, and its prefix; the model itself where there is none."""
    for name, module in model.named_modules():
        if callable(getattr(type(module), "group_matcher", None)):
            return (f"{name}." if name else ""), module
    return "", model
