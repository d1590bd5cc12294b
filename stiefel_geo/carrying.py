"""Frames into a module and out of it: installing, folding, and loading plain checkpoints.

Classes of deep copies are shared (`ModelEma` copies a parametrized model), so nothing here touches a class
that another module may have: `torch.nn.utils.parametrize.remove_parametrizations` would.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .frames import FrameRows, retire
from .layouts import LayoutError, find
from .projections import Factors, Plan, Projection, factorise, resolve

RECORD = "_stiefel_geo"  # attribute of a patched attention module that holds its report entry


def plan_of(attention: nn.Module) -> Plan:
    """The plan of a module of a registered class. Raises LayoutError with the reason if there is none."""
    if (found := find(attention)) is None:
        raise LayoutError("no layout is registered for its class")
    return resolve(attention, *found)


def plain_weights(plan: Plan) -> dict[str, Tensor]:
    """Weights by path, assembled where they are carried by frames."""
    return {p.path: _plain_weight(p) for p in plan.projections}


def _plain_weight(projection: Projection) -> Tensor:
    carried = projection.frame_rows
    weight = getattr(projection.owner, projection.tensor) if carried is None else carried.assemble()
    return weight.detach()


def biases_of(attention: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Biases by path that a change of gauge may transform."""
    return {path: attention.get_parameter(path) for path in plan.bias_paths()}


def carry(attention: nn.Module, plan: Plan, factors: Factors, core: str) -> None:
    """Replace every projection's weight by its frames."""
    for p in plan.projections:
        old = p.owner._parameters[p.tensor]
        assert old is not None  # resolve() has seen it
        carried = FrameRows(p.rows, old, core)
        carried.put(factors.frames[p.path], factors.cores[p.path], old)
        carried.order = tuple(p.owner._parameters)
        retire(old, "patch(model)")
        install(p.owner, p.tensor, carried)
    write_biases(attention, factors)
    attention.register_load_state_dict_pre_hook(factorise_plain_keys)  # type: ignore[no-untyped-call]


def write_biases(attention: nn.Module, factors: Factors) -> None:
    for path, value in factors.biases.items():
        attention.get_parameter(path).data.copy_(value)


def install(owner: nn.Module, tensor: str, carried: FrameRows) -> None:
    """Let `carried` make `owner.tensor`; the parameter of that name goes."""
    carried._live = False
    parametrize.register_parametrization(owner, tensor, carried, unsafe=True)


def fold(projection: Projection, replaced_by: str) -> FrameRows:
    """A plain parameter again in place of the frames, under its old name and at its old position."""
    owner, tensor, carried = projection.owner, projection.tensor, projection.frame_rows
    assert carried is not None
    weight = nn.Parameter(carried.assemble().detach(), any(p.requires_grad for p in _weights(carried)))
    for parameter in carried.parameters():
        retire(parameter, replaced_by)
    _uninstall(owner, tensor)
    owner.register_parameter(tensor, weight)
    for name in carried.order:
        if name in owner._parameters:  # others of the owner may still be frames
            owner._parameters[name] = owner._parameters.pop(name)
    return carried


def _weights(carried: FrameRows) -> list[Tensor]:
    rest = [] if carried.rest is None else [carried.rest]
    return [frames for _, frames in carried.named_frames()] + rest


def _uninstall(owner: nn.Module, tensor: str) -> None:
    cls = type(owner)
    del owner.parametrizations[tensor]  # type: ignore[operator, union-attr]
    if parametrize.is_parametrized(owner):  # by someone else, on another tensor
        owner.__class__ = type(cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k != tensor})
    else:
        del owner.parametrizations
        owner.__class__ = cls.__bases__[0]


def forget(attention: nn.Module) -> None:
    """Drop what `patch` left on an attention module whose weights are plain again."""
    vars(attention).pop(RECORD, None)
    hooks = attention._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is factorise_plain_keys]:
        del hooks[key]


def factorise_plain_keys(
    attention: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object, _strict: object,
    _missing: object, _unexpected: object, errors: list[str],
) -> None:  # fmt: skip
    """Load hook: plain weights among `state_dict`'s keys become the frames, cores and biases of this module."""
    plan = plan_of(attention)
    given = [p for p in plan.projections if prefix + p.key in state_dict and p.frame_rows is not None]
    weights = plain_weights(plan) if len(given) < len(plan.projections) else {}
    for p in given:
        weights[p.path] = _fitting(state_dict.pop(prefix + p.key), p, prefix, errors)
    if not given or errors:
        return
    own = biases_of(attention, plan)
    biases = {path: state_dict.get(prefix + path, own[path]) for path in own}
    factors = factorise(plan, weights, biases)
    state_dict.update({prefix + path: value for path, value in factors.biases.items()})
    for p in plan.projections:
        state_dict.update(_carried_entries(p, factors, weights[p.path], prefix + p.carried_key))


def _fitting(weight: Tensor, projection: Projection, prefix: str, errors: list[str]) -> Tensor:
    """`weight` in the module's own shape (linear and 1×1 convolution exchange checkpoints), or an error noted."""
    shape = projection.shape()
    if weight.numel() == shape.numel() and weight.shape[:2] == shape[:2]:
        return weight.reshape(shape)
    errors.append(
        f"size mismatch for {prefix}{projection.key}: copying a param with shape {weight.shape} from checkpoint, "
        f"the shape in current model is {shape}."
    )
    return weight


def _carried_entries(projection: Projection, factors: Factors, weight: Tensor, prefix: str) -> dict[str, Tensor]:
    carried = projection.frame_rows
    assert carried is not None
    names = [name for name, _ in carried.named_frames()] + [name for name, _ in carried.named_cores()]
    values = factors.frames[projection.path] + factors.cores[projection.path]
    entries = {prefix + name: carried.stored(value, weight) for name, value in zip(names, values, strict=False)}
    _, rest = projection.rows.split(weight.detach().flatten(1))
    return entries if rest is None else entries | {f"{prefix}rest": rest}


def finite(plan: Plan) -> bool:
    """Whether every weight and bias can be factorised; True on the meta device."""
    weights = plain_weights(plan).values()
    return all(weight.is_meta or bool(torch.isfinite(weight).all()) for weight in weights)
