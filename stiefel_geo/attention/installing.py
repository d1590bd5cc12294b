"""FrameRows into a module and out of it.

Classes of deep copies are shared (`ModelEma` copies a parametrized model), so nothing here touches a class
that another module may have: `torch.nn.utils.parametrize.remove_parametrizations` would.
Parametrizations that someone else put on top of the frames stay, on the plain weight as on the frames.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .parametrization import FrameRows
from .state_dicts import attach_hooks, detach_hooks


def retire(parameter: Tensor, replaced_by: str) -> None:
    """Mark a parameter that left its model, so that an optimizer which still holds it can say so."""
    sentence = f"this parameter was replaced by {replaced_by}; build the optimizer after it"
    parameter._stiefel_geo_retired = sentence  # type: ignore[attr-defined]


def install(owner: nn.Module, tensor: str, made_by: FrameRows, replaced_by: str) -> None:
    """Let `made_by` make `owner.tensor` from here on; the parameter of that name goes."""
    for parameter in made_by.parameters():
        vars(parameter).pop("_stiefel_geo_retired", None)
    retire(plain_parameter(owner, tensor), replaced_by)
    if parametrize.is_parametrized(owner, tensor):
        _stack_on(_stack(owner, tensor), made_by)
    else:
        parametrize.register_parametrization(owner, tensor, made_by, unsafe=True)
    attach_hooks(owner)


def uninstall(owner: nn.Module, tensor: str, made_by: FrameRows, replaced_by: str) -> None:
    """A plain parameter again in place of the frames, under its old name and at its old position."""
    weight = nn.Parameter(made_by.fold(), made_by.trained)
    for parameter in made_by.parameters():
        retire(parameter, replaced_by)
    detach_hooks(owner)
    if len(stack := _stack(owner, tensor)) > 1:
        del stack[0]
        stack.register_parameter("original", weight)
        stack.is_tensor, stack.ntensors = True, 1
        return
    _remove(owner, tensor)
    owner.register_parameter(tensor, weight)
    for name in made_by.order:
        if name in owner._parameters:  # others of the owner may still be frames
            owner._parameters[name] = owner._parameters.pop(name)


def plain_parameter(owner: nn.Module, tensor: str) -> Any:
    """The parameter under `owner.tensor`, below whatever parametrizes it; None where there is none of that name."""
    if parametrize.is_parametrized(owner, tensor):
        return _stack(owner, tensor)._parameters.get("original")
    return owner._parameters.get(tensor)


def _stack(owner: nn.Module, tensor: str) -> Any:
    """torch's ParametrizationList of a tensor."""
    return owner.parametrizations[tensor]  # type: ignore[index]


def _stack_on(stack: Any, made_by: FrameRows) -> None:
    """Frames below parametrizations that took a plain weight until now."""
    del stack._parameters["original"]
    stack.insert(0, made_by)
    stack.is_tensor, stack.ntensors = False, 0


def _remove(owner: nn.Module, tensor: str) -> None:
    cls = type(owner)
    del owner.parametrizations[tensor]  # type: ignore[operator, union-attr]
    if parametrize.is_parametrized(owner):  # by someone else, on another tensor
        owner.__class__ = type(cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k != tensor})
    else:
        del owner.parametrizations
        owner.__class__ = cls.__bases__[0]


def made_of(weight: nn.Parameter, made_by: FrameRows) -> bool:
    """Whether a plain weight is still, to the last bit, what the frames folded into it."""
    made_by.to(weight.device)
    return weight.is_meta or torch.equal(made_by.fold(), weight)
