"""Code that writes weights after construction, on a patched model.

A write into a weight that frames assemble would be lost: nn.init functions, `.copy_`, `.data`. `unpatched` gives
such code plain weights for its while and factorises what it leaves. The methods by which timm's models write their
own weights run inside it by themselves; a write elsewhere is noticed by FrameRows and raises.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from .carrying import (
    RECORD,
    biases_of,
    fold,
    forget,
    install,
    plain_weights,
    plan_of,
    write_biases,
)
from .frames import FrameRows, retire
from .layouts import LayoutError
from .projections import Plan, Projection, factorise

WRITERS = ("init_weights", "load_pretrained", "reparameterize", "reset_parameters", "_reset_parameters")
Folded = list[tuple[Projection, FrameRows]]


@contextmanager
def unpatched(model: nn.Module) -> Iterator[nn.Module]:
    """Plain weights and timm's own keys inside the block; frames, the very same parameters, after it.

    For code that writes weights or reads `model.state_dict()` keys, as some `checkpoint_filter_fn` do:

        with unpatched(model):
            timm.models.load_checkpoint(model, "original.pth", filter_fn=xcit.checkpoint_filter_fn)

    Weights that the block leaves as they were come back as the same frames, bit for bit; others are factorised.
    Modules whose projections the block replaces by others stay plain, with a warning.
    """
    folded = [(attention, _fold_all(attention)) for attention in model.modules() if hasattr(attention, RECORD)]
    try:
        yield model
    finally:
        for attention, projections in folded:
            _restore(attention, projections)


def _fold_all(attention: nn.Module) -> Folded:
    carried = [p for p in plan_of(attention).projections if p.frame_rows is not None]
    for projection in carried:
        projection.frame_rows.refuse_lost_write()  # type: ignore[union-attr]
    return [(projection, fold(projection, "unpatched(model)")) for projection in carried]


def _restore(attention: nn.Module, folded: Folded) -> None:
    if not folded:
        return
    plan = _same_plan(attention, folded)
    if plan is None:
        forget(attention)
        warnings.warn(_REBUILT.format(type(attention).__name__), RuntimeWarning, stacklevel=4)
        return
    weights = plain_weights(plan)
    if any(not _equal(carried, weights[p.path]) for p, carried in folded):
        factors = factorise(plan, weights, biases_of(attention, plan))
        for p, carried in folded:
            carried.update(factors.frames[p.path], factors.cores[p.path], weights[p.path])
        write_biases(attention, factors)
    for p, carried in folded:
        retire(p.owner._parameters[p.tensor], "the frames that it was folded from")  # type: ignore[arg-type]
        for parameter in carried.parameters():
            vars(parameter).pop("_stiefel_geo_retired", None)
        install(p.owner, p.tensor, carried)


_REBUILT = "The projections of a {} were rebuilt and are plain now; call patch(model) again if they are to be trained."


def _same_plan(attention: nn.Module, folded: Folded) -> Plan | None:
    """The plan as it is now, None where the projections are no longer those that were folded."""
    try:
        plan = plan_of(attention)
    except LayoutError:
        return None
    now = {p.path: (p.owner, p.rows) for p in plan.projections}
    return plan if now == {p.path: (p.owner, p.rows) for p, _ in folded} else None


def _equal(carried: FrameRows, weight: torch.Tensor) -> bool:
    if weight.is_meta:
        return True
    carried.to(weight.device)
    return torch.equal(carried.assemble(), weight)


def guard(model: nn.Module, names: Iterable[str]) -> None:
    """Let the weight-writing methods of the named modules, and of the modules around them, run unpatched."""
    around = {owner for name in names for owner in _around(name)}
    for module in map(model.get_submodule, sorted(around)):
        for method in WRITERS:
            if callable(getattr(type(module), method, None)):
                vars(module).setdefault(method, MethodType(_RUN_UNPATCHED[method], module))


def release(model: nn.Module) -> None:
    """Undo `guard`."""
    for module in model.modules():
        for method in WRITERS:
            if getattr(vars(module).get(method), "__func__", None) is _RUN_UNPATCHED[method]:
                del vars(module)[method]


def _around(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _run_unpatched(method: str) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with unpatched(self):
            return getattr(type(self), method)(self, *args, **kwargs)

    return run


_RUN_UNPATCHED = {method: _run_unpatched(method) for method in WRITERS}
