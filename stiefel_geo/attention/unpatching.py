"""Back to plain weights: for good, or for the while of code that writes weights or reads their names.

A write into a weight that frames assemble would be lost: nn.init functions, `.copy_`. `unpatched` gives such code
plain weights for its while and factorises what it leaves. The methods by which timm's models write their own weights
run inside it by themselves; a write elsewhere is noticed by FrameRows and raises.
"""

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .installing import install, made_of, plain_parameter, uninstall
from .parametrization import FrameRows
from .projections import owners

WRITERS = ("init_weights", "load_pretrained", "reparameterize", "reset_parameters", "_reset_parameters")
Made = list[tuple[nn.Module, str, FrameRows]]


@torch.inference_mode(False)
def unpatch(model: nn.Module) -> None:
    """Fold the frames back: classes, keys, their order, the weights and the function are the plain model's again.

    Weights are the products F·C, equal to the original ones up to rounding. Build optimizers after it.
    """
    _uninstall_all(model, "unpatch(model)")
    release(model)


@contextmanager
def unpatched(model: nn.Module) -> Iterator[nn.Module]:
    """Plain weights and timm's own keys inside the block; frames, the very same parameters, after it.

    For code that writes weights or reads `model.state_dict()` keys, as some `checkpoint_filter_fn` do:

        with unpatched(model):
            timm.models.load_checkpoint(model, "original.pth", filter_fn=xcit.checkpoint_filter_fn)

    Weights that the block leaves as they were come back as the same frames, bit for bit; others are factorised.
    Projections that the block replaces by others stay plain, with a warning.
    """
    made = _uninstall_all(model, "unpatched(model)")
    try:
        yield model
    finally:
        modules = set(model.modules())
        for owner, tensor, made_by in made:
            _restore(owner, tensor, made_by, owner in modules)


def _uninstall_all(model: nn.Module, replaced_by: str) -> Made:
    made = [(owner, tensor, made_by) for _, owner, tensor, made_by in owners(model)]
    for _, _, made_by in made:
        made_by.refuse_lost_write()
    for owner, tensor, made_by in made:
        uninstall(owner, tensor, made_by, replaced_by)
    return made


def _restore(owner: nn.Module, tensor: str, made_by: FrameRows, in_model: bool) -> None:
    weight = plain_parameter(owner, tensor)
    if not in_model or type(weight) is not nn.Parameter or weight.shape != made_by.shape:
        warnings.warn(_REBUILT.format(type(owner).__name__), RuntimeWarning, stacklevel=4)
        return
    if not made_of(weight, made_by):
        made_by.take(made_by.factors(weight))
    install(owner, tensor, made_by, "the frames that it was folded from")


_REBUILT = "A projection, {}, was rebuilt and is plain now; call patch(model) again if it is to be trained on frames."


class UnpatchedMethod:
    """A weight-writing method of a module, run while the module is unpatched. Holds the module weakly: no cycle."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self._module, self._method = weakref.ref(module), method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (module := self._module()) is None:  # a temporary, freed before the call: nobody sees what is written
            return None
        with unpatched(module):
            return getattr(type(module), self._method)(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnpatchedMethod":
        return type(self)(copy.deepcopy(self._module(), memo), self._method)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._method)


def guard(model: nn.Module) -> None:
    """Let the weight-writing methods of the modules around frames run unpatched."""
    for name, *_ in list(owners(model)):
        parts = name.split(".") if name else []
        for module in [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]:
            for method in WRITERS:
                if callable(getattr(type(module), method, None)):
                    vars(module).setdefault(method, UnpatchedMethod(module, method))


def release(model: nn.Module) -> None:
    """Undo `guard`."""
    for module in model.modules():
        for method in WRITERS:
            if isinstance(vars(module).get(method), UnpatchedMethod):
                del vars(module)[method]
