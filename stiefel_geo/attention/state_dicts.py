"""Names and state dicts: the plain model's keys in and out of a patched one.

Both ways are hooks of the module that owns the weight, so that wrappers, modules under two names and blocks that
layers share come out as they would without the patch.
"""

import copy
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .factorisation import whole
from .parametrization import FrameRows

_plain_keys: ContextVar[bool] = ContextVar("plain keys", default=False)


def plain_state_dict(model: nn.Module) -> OrderedDict[str, Any]:
    """The state dict that the unpatched model would have: its keys in its order, frames folded into weights.

    Every tensor is a copy, and whole: of a sharded model call it on all ranks.
    """
    token = _plain_keys.set(True)
    try:
        saved: Any = model.state_dict()
    finally:
        _plain_keys.reset(token)
    state: OrderedDict[str, Any] = saved
    for key, value in state.items():
        state[key] = whole(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    metadata = getattr(state, "_metadata", {})  # versions of the modules, which some of them read on loading
    state._metadata = OrderedDict((k, v) for k, v in metadata.items() if ".parametrizations" not in f".{k}")  # type: ignore[attr-defined]
    return state


def frame_rows_by_prefix(model: nn.Module) -> dict[str, FrameRows]:
    """Prefix of the names of its parameters → what makes a weight."""
    return {f"{name}.": module for name, module in model.named_modules() if isinstance(module, FrameRows)}


def plain_key(prefix: str) -> str:
    """Key of the weight that is made there: "a.qkv.parametrizations.weight.0." → "a.qkv.weight"."""
    owner, _, tensor = f".{prefix}".removesuffix(".0.").rpartition(".parametrizations.")
    return f"{owner}.{tensor}".removeprefix(".")


def attach_hooks(owner: nn.Module) -> None:
    """Let `owner` load plain keys, and save them for `plain_state_dict`."""
    detach_hooks(owner)
    owner.register_load_state_dict_pre_hook(_factorise_plain_keys)
    owner.register_state_dict_post_hook(_fold_into_plain_keys)


def detach_hooks(owner: nn.Module) -> None:
    """Take off what `attach_hooks` put on."""
    for hooks in (owner._load_state_dict_pre_hooks, owner._state_dict_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in _HOOKS]:
            del hooks[key]


def _made(owner: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Tensors of `owner` that frames make, each with all of its parametrizations."""
    stacks = [(tensor, list(stack)) for tensor, stack in owner.parametrizations.items()]  # type: ignore[union-attr, operator]
    return [(tensor, stack) for tensor, stack in stacks if isinstance(stack[0], FrameRows)]


def _fold_into_plain_keys(owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    """Save hook: within `plain_state_dict`, put the keys of the plain module in place of those just saved."""
    if not _plain_keys.get():
        return
    own = {key: state.pop(key) for key in [key for key in state if key.startswith(prefix)]}
    order: tuple[str, ...] = ()
    for tensor, stack in _made(owner):
        made_by, stem = stack[0], f"{prefix}parametrizations.{tensor}."
        assert isinstance(made_by, FrameRows)
        weight = {(f"{stem}original" if len(stack) > 1 else prefix + tensor): made_by.fold()}
        own = weight | _renumbered(
            {k: v for k, v in own.items() if not k.startswith(f"{stem}0.")}, stem, len(stack), -1
        )
        order = max(order, made_by.order, key=len)
    for key in [prefix + name for name in order]:
        if key in own:
            state[key] = own.pop(key)
    state.update(own)


def _renumbered(entries: dict[str, Any], stem: str, count: int, by: int) -> dict[str, Any]:
    """The keys of the parametrizations that stand on the frames, which count from 0 without them and from 1 with."""
    numbers = {f"{stem}{i}": f"{stem}{i + by}" for i in range(count)}
    heads = {key: key[: len(stem)] + key[len(stem) :].partition(".")[0] for key in entries}
    return {numbers.get(heads[key], heads[key]) + key[len(heads[key]) :]: value for key, value in entries.items()}


def _factorise_plain_keys(
    owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: object, _strict: object,
    _missing: object, _unexpected: object, errors: list[str],
) -> None:  # fmt: skip
    """Load hook: a plain weight among the keys of `state` becomes the frames, cores and rest that it is made of."""
    for tensor, stack in _made(owner):
        made_by, stem = stack[0], f"{prefix}parametrizations.{tensor}."
        assert isinstance(made_by, FrameRows)
        weight = state.pop(prefix + tensor, None)
        if weight is None and f"{stem}original" in state:
            weight = state.pop(f"{stem}original")
            others = {key: state.pop(key) for key in [key for key in state if key.startswith(stem)]}
            state.update(_renumbered(others, stem, len(stack), 1))
        if weight is not None:
            values = _fitting_factors(made_by, weight, prefix + tensor, errors)
            state.update({f"{stem}0.{name}": value for name, value in values.items()})


def _fitting_factors(made_by: FrameRows, weight: Tensor, key: str, errors: list[str]) -> dict[str, Tensor]:
    """Factors of `weight` in the module's own shape (linear and 1×1 convolution exchange checkpoints); or an error."""
    shape = made_by.shape
    if weight.numel() != shape.numel() or weight.shape[:2] != shape[:2]:
        errors.append(
            f"size mismatch for {key}: copying a param with shape {weight.shape} from checkpoint, "
            f"the shape in current model is {shape}."
        )
    elif not weight.is_meta and not bool(torch.isfinite(weight).all()):
        errors.append(f"{key} in the checkpoint holds NaN or infinity, which have no frames")
    else:
        return made_by.factors(weight.reshape(shape))
    return dict(made_by.named_parameters()) | dict(made_by.named_buffers())


_HOOKS = (_factorise_plain_keys, _fold_into_plain_keys)
