"""A patched model's state dict under the plain model's keys."""

from collections import OrderedDict
from typing import Any

from torch import nn

from .frames import FrameRows


def plain_state_dict(model: nn.Module) -> OrderedDict[str, Any]:
    """The state dict that the unpatched model would have: its keys in its order, frames folded into weights."""
    state, carriers = model.state_dict(), carriers_of(model)
    folded = {plain_key(prefix): carried.assemble().detach() for prefix, carried in carriers.items()}
    siblings: dict[str, list[str]] = {key.rpartition(".")[0]: [] for key in folded}  # owner → its parameters
    for prefix, carried in carriers.items():
        owner = plain_key(prefix).rpartition(".")[0]
        siblings[owner] = max(siblings[owner], [_join(owner, name) for name in carried.order], key=len)
    plain: OrderedDict[str, Any] = OrderedDict()
    for key in state:
        ahead = [name for owner in _owners(key) for name in siblings.get(owner, [])]
        kept = [] if key.startswith(tuple(carriers)) else [key]
        for name in ahead + kept:
            if name not in plain and (name in state or name in folded):
                plain[name] = folded[name] if name in folded else state[name]
    _copy_metadata(state, plain)
    return plain


def _copy_metadata(state: Any, plain: Any) -> None:
    """Versions of the modules, which some of them read on loading."""
    metadata = getattr(state, "_metadata", {})
    plain._metadata = OrderedDict((k, v) for k, v in metadata.items() if ".parametrizations" not in f".{k}")


def carriers_of(model: nn.Module) -> dict[str, FrameRows]:
    """Prefix of the names of its parameters → what carries a projection."""
    return {f"{name}.": module for name, module in model.named_modules() if isinstance(module, FrameRows)}


def plain_key(prefix: str) -> str:
    """ "a.qkv.parametrizations.weight.0." → "a.qkv.weight"."""
    owner, _, tensor = f".{prefix}".removesuffix(".0.").rpartition(".parametrizations.")
    return _join(owner.removeprefix("."), tensor)


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def _owners(key: str) -> list[str]:
    """Modules that a key lies in, the model itself first."""
    parts = key.split(".")[:-1]
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]
