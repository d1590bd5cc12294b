"""An attention module's query and key projections: found by its layout and checked, nothing changed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .layouts import Layout, LayoutError, Rows, class_name, find
from .parametrization import FrameRows

PROJECTIONS = (nn.Linear, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Projection:
    """One weight with query or key rows: `owner.tensor`, at `path` below the attention module."""

    path: str
    owner: nn.Module
    tensor: str
    rows: Rows

    @property
    def roles(self) -> str:
        return "".join(self.rows.roles)

    @property
    def key(self) -> str:
        """Its name in a plain state dict, below the attention module."""
        return f"{self.path}.{self.tensor}" if self.tensor == "weight" else self.path

    @property
    def frame_rows(self) -> FrameRows | None:
        """What makes it once it is patched."""
        return frame_rows(self.owner, self.tensor)

    def heads(self) -> list[Tensor]:
        """Its matrices W (n, d, r), one stack per head width, whether frames make them or not."""
        made_by = self.frame_rows
        weight = getattr(self.owner, self.tensor) if made_by is None else made_by.assemble()
        return self.rows.split(weight.detach().flatten(1))[0]


def frame_rows(owner: nn.Module, tensor: str) -> FrameRows | None:
    """The FrameRows that make `owner.tensor`, if any."""
    if not parametrize.is_parametrized(owner, tensor):
        return None
    first = owner.parametrizations[tensor][0]  # type: ignore[index]
    return first if isinstance(first, FrameRows) else None


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, FrameRows]]:
    """Every weight that frames make: name of its module, that module, the tensor's name, and what makes it."""
    for name, owner in model.named_modules():
        if parametrize.is_parametrized(owner):
            for tensor in owner.parametrizations:
                if (made_by := frame_rows(owner, tensor)) is not None:
                    yield name, owner, tensor, made_by


def projections_of(attention: nn.Module) -> list[Projection]:
    """The projections of a module of a registered class. Raises LayoutError with the reason if there are none."""
    if (found := find(attention)) is None:
        raise LayoutError("no layout is registered for its class")
    cls, layout = found
    if layout.skip:
        raise LayoutError(layout.skip)
    try:
        projections = [_projection(attention, layout, path, row) for path, row in _paths(attention, layout)]
    except AttributeError as error:
        raise LayoutError(f"the layout of {class_name(cls)} reads what this module has not: {error}") from error
    if not projections:
        raise LayoutError(f"it has none of the projections {', '.join(layout.rows)}")
    return projections


def frame_rows_of(attention: nn.Module) -> list[FrameRows]:
    """What makes its projections, adapters around them or not; empty where the module is not patched."""
    found = find(attention)
    paths = [] if found is None else [path for path, _ in _paths(attention, found[1])]
    made_by = []
    for path in paths:
        if isinstance(target := _get(attention, path), FrameRows):
            made_by.append(target)
        elif isinstance(target, nn.Module):
            made_by += [module for module in target.modules() if isinstance(module, FrameRows)]
    return made_by


def _paths(attention: nn.Module, layout: Layout) -> list[tuple[str, str]]:
    """Paths that exist below the module, one per index for "qkvs.*.conv", and the layout's word for each."""
    found = []
    for row in layout.rows:
        before, star, after = row.partition(".*.")
        members = range(len(_get(attention, before))) if star else ()  # type: ignore[arg-type]
        expanded = [f"{before}.{i}.{after}" for i in members] if star else [row]
        found += [(path, row) for path in expanded if _get(attention, path) is not None]
    return found


def _get(module: nn.Module, path: str) -> object:
    """The attribute at a dotted path, None where a part is missing; FrameRows in place of the weight they make."""
    found: object = module
    for name in path.split("."):
        made_by = frame_rows(found, name) if isinstance(found, nn.Module) else None
        found = getattr(found, name, None) if made_by is None else made_by
    return found


def _projection(attention: nn.Module, layout: Layout, path: str, row: str) -> Projection:
    """The projection at `path`, which leads to a module with a weight, to a weight, or to what makes one."""
    parent, _, last = path.rpartition(".")
    target = _get(attention, path)
    weight = not isinstance(target, nn.Module) or isinstance(target, FrameRows)
    owner, tensor = (attention.get_submodule(parent), last) if weight else (target, "weight")
    assert isinstance(owner, nn.Module)
    shape = _checked_shape(path, owner, tensor, layout.transposed)
    total, columns = shape[1::-1] if layout.transposed else shape[:2]
    rows = layout.arrange(layout.order(row, attention), total, attention)
    if (widest := max(rows.widths)) > columns:
        raise LayoutError(f"a head of {path} has {widest} rows of {columns} columns; a frame needs d ≥ r")
    return Projection(path, owner, tensor, rows)


def _checked_shape(path: str, owner: nn.Module, tensor: str, transposed: bool) -> torch.Size:
    """The shape (rows, columns, 1, 1) of a weight that frames can make."""
    if (made_by := frame_rows(owner, tensor)) is not None:
        return made_by.shape
    if parametrize.is_parametrized(owner, tensor):
        raise LayoutError(f"{path} already has a parametrization of its {tensor}; remove that first")
    if tensor == "weight" and not (transposed or isinstance(owner, PROJECTIONS)):
        raise LayoutError(f"{path} is a {class_name(type(owner))}, not an nn.Linear or a convolution")
    weight = getattr(owner, tensor, None)
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise LayoutError(f"{path} holds its weight as {type(weight).__name__}; patch before quantising or sharding")
    if weight.dim() < 2:  # as under DeepSpeed's ZeRO-3
        raise LayoutError(f"{path} holds no whole weight but shape {tuple(weight.shape)}; use fully_shard, not ZeRO-3")
    if weight.is_meta and "forward" in vars(owner):  # as accelerate's hooks do
        raise LayoutError(f"{path} is offloaded: its weight is there in its forward alone; patch before dispatching")
    if weight.dim() > 2 and (weight.shape[2:].numel() != 1 or getattr(owner, "groups", 1) != 1):
        raise LayoutError(f"{path} is a convolution of shape {tuple(weight.shape)}, not 1×1 in one group")
    return weight.shape
