"""An attention module's query and key projections: found, checked and factorised, nothing changed.

`resolve` reads a module by its layout; `factorise` is a pure function of weights and biases, so that `patch`,
assigned weights and loaded checkpoints go through the same arithmetic.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .frames import FrameRows, canonical, exact, polar
from .layouts import Layout, LayoutError, Rows, class_name

Stack = list[Tensor]


@dataclass(frozen=True)
class Projection:
    """One weight with query or key rows: `owner.tensor`, at `path` below the attention module."""

    path: str
    owner: nn.Module
    tensor: str
    rows: Rows
    bias: str | None  # path of its own bias

    @property
    def roles(self) -> str:
        return "".join(self.rows.roles)

    @property
    def frame_rows(self) -> FrameRows | None:
        """What carries it once it is patched."""
        return frame_rows(self.owner, self.tensor)

    @property
    def key(self) -> str:
        """Its name in a plain state dict, below the attention module."""
        return f"{self.path}.{self.tensor}" if self.tensor == "weight" else self.path

    @property
    def carried_key(self) -> str:
        """Prefix of its frames, cores and remaining rows in a patched state dict."""
        stem = self.key.removesuffix(self.tensor)
        return f"{stem}parametrizations.{self.tensor}.0."

    def shape(self) -> torch.Size:
        return self.frame_rows.shape if self.frame_rows is not None else getattr(self.owner, self.tensor).shape


@dataclass(frozen=True)
class Plan:
    """The projections of one attention module, and whether only W_Q W_Kᵀ matters there."""

    projections: tuple[Projection, ...]
    plain: bool
    biases: Mapping[str, str]  # role → bias that is not a projection's own

    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(frames, d, r) of every stack."""
        return tuple(
            (len(roles), _columns(projection.shape()), width)
            for projection in self.projections
            for roles, width in zip(projection.rows.roles, projection.rows.widths, strict=True)
        )

    def bias_paths(self) -> list[str]:
        own = [projection.bias for projection in self.projections if projection.bias is not None]
        return own + list(self.biases.values())


@dataclass(frozen=True)
class Factors:
    """Frames and cores of every projection by path, the biases in their gauge, and what core="identity" changes."""

    kind: str
    frames: dict[str, Stack]
    cores: dict[str, Stack]
    biases: dict[str, Tensor]
    change: float


def frame_rows(owner: nn.Module, tensor: str) -> FrameRows | None:
    """The FrameRows that carry `owner.tensor`, if any."""
    if not parametrize.is_parametrized(owner, tensor):
        return None
    first = owner.parametrizations[tensor][0]  # type: ignore[index]
    return first if isinstance(first, FrameRows) else None


def resolve(attention: nn.Module, cls: type, layout: Layout) -> Plan:
    """The plan of `attention`, whose nearest registered class is `cls`. Raises LayoutError with the reason."""
    if layout.skip:
        raise LayoutError(layout.skip)
    found = [_projection(attention, layout, path, row) for row in layout.rows for path in _expand(attention, row)]
    if not found:
        raise LayoutError(f"it has none of the projections {', '.join(layout.rows)}")
    biases = {role: path for role, path in layout.biases.items() if _get(attention, path) is not None}
    return Plan(tuple(found), _is_plain(attention, cls, layout, found), biases)


def _expand(attention: nn.Module, path: str) -> list[str]:
    """Paths that exist below the module: the path itself, or one per index for "qkvs.*.conv"."""
    if "*" in path:
        before, after = path.split(".*.")
        members = _get(attention, before)
        return [f"{before}.{i}.{after}" for i in range(len(members))]  # type: ignore[arg-type]
    return [path] if _get(attention, path) is not None else []


def _get(module: nn.Module, path: str) -> object:
    """The attribute at a dotted path, None where a part of it is missing or None."""
    found: object = module
    for name in path.split("."):
        if isinstance(found, nn.Module) and _names_frames(found, name):
            return found  # do not assemble the weight to see that it is there
        found = getattr(found, name, None)
    return found


def _names_frames(module: nn.Module, name: str) -> bool:
    return frame_rows(module, name) is not None


def _projection(attention: nn.Module, layout: Layout, path: str, row: str) -> Projection:
    parent, _, last = path.rpartition(".")
    target = attention.get_submodule(path) if path in dict(attention.named_modules()) else None
    owner, tensor = (attention.get_submodule(parent), last) if target is None else (target, "weight")
    own_bias = f"{path}.bias" if target is not None else path.replace("weight", "bias")
    projection = _checked(path, owner, tensor)
    total = projection[0]
    rows = layout.arrange(layout.order(row, attention), total, attention)
    _check_frames(path, rows, projection[1])
    return Projection(path, owner, tensor, rows, own_bias if _get(attention, own_bias) is not None else None)


def _checked(path: str, owner: nn.Module, tensor: str) -> tuple[int, int]:
    """(rows, columns) of a weight that can carry frames."""
    if (carried := frame_rows(owner, tensor)) is not None:
        return carried.shape[0], _columns(carried.shape)
    if parametrize.is_parametrized(owner, tensor):
        raise LayoutError(f"{path} already has a parametrization of its {tensor}; remove that first")
    if tensor == "weight" and not isinstance(owner, nn.Linear | nn.Conv2d):
        raise LayoutError(f"{path} is a {class_name(type(owner))}, not an nn.Linear or nn.Conv2d")
    weight = getattr(owner, tensor, None)
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise LayoutError(f"{path} holds its weight as {type(weight).__name__}; patch before quantising or sharding")
    if weight.dim() > 2 and (weight.shape[2:].numel() != 1 or getattr(owner, "groups", 1) != 1):
        raise LayoutError(f"{path} is a convolution of shape {tuple(weight.shape)}, not 1×1 in one group")
    return weight.shape[0], _columns(weight.shape)


def _columns(shape: torch.Size) -> int:
    return shape[1]


def _check_frames(path: str, rows: Rows, columns: int) -> None:
    if (widest := max(rows.widths)) > columns:
        raise LayoutError(f"a head of {path} has {widest} rows of {columns} columns; a frame needs d ≥ r")


def _is_plain(attention: nn.Module, cls: type, layout: Layout, found: list[Projection]) -> bool:
    """Only W_Q W_Kᵀ matters: the layout says so, and the class's own forward runs on one key head per query."""
    own_forward = type(attention).forward is cls.forward and "forward" not in vars(attention)  # type: ignore[attr-defined]
    roles = "".join(projection.roles for projection in found)
    paired = roles.count("q") == roles.count("k") and all(len(p.rows.roles) == 1 for p in found)
    plain = layout.plain(attention) if callable(layout.plain) else layout.plain
    return plain and own_forward and paired


def factorise(plan: Plan, weights: Mapping[str, Tensor], biases: Mapping[str, Tensor]) -> Factors:
    """Frames and cores of the weights by path; canonical where the plan allows it and the product is regular."""
    stacks = {p.path: p.rows.split(weights[p.path].detach().flatten(1))[0] for p in plan.projections}
    if any(stack.is_meta for part in stacks.values() for stack in part):
        return _shapes_only(plan, stacks)
    stacks = {path: [exact(stack) for stack in part] for path, part in stacks.items()}
    return (_canonical(plan, stacks, biases) if plan.plain else None) or _polar(stacks)


def _shapes_only(plan: Plan, stacks: dict[str, Stack]) -> Factors:
    def core(stack: Tensor) -> Tensor:
        n, _, r = stack.shape
        return stack.new_empty((n, r) if plan.plain else (n, r, r))

    cores = {path: [core(stack) for stack in part] for path, part in stacks.items()}
    return Factors("canonical" if plan.plain else "polar", stacks, cores, {}, float("nan"))


def _polar(stacks: dict[str, Stack]) -> Factors:
    pairs = {path: [polar(stack) for stack in part] for path, part in stacks.items()}
    frames = {path: [F for F, _ in part] for path, part in pairs.items()}
    cores = {path: [C for _, C in part] for path, part in pairs.items()}
    flat = [C for part in cores.values() for C in part]
    change = _relative((C - torch.eye(C.shape[-1], dtype=C.dtype), C) for C in flat)
    return Factors("polar", frames, cores, {}, change)


def _canonical(plan: Plan, stacks: dict[str, Stack], biases: Mapping[str, Tensor]) -> Factors | None:
    bias_stacks = {p.path: _bias_stack(plan, p, biases) for p in plan.projections}
    halves = {role: _select(plan, role, {path: part[0] for path, part in stacks.items()}) for role in "qk"}
    bias_halves = {role: _select(plan, role, bias_stacks) for role in "qk"}
    found = canonical(halves["q"], halves["k"], bias_halves["q"], bias_halves["k"])
    if found is None:
        return None
    frames = _place(plan, found.query, found.key)
    cores = _place(plan, found.root, found.root)
    new_biases = _place(plan, found.query_bias, found.key_bias)
    change = _relative([(found.root**2 - 1, found.root**2)])
    return Factors("canonical", frames, cores, _bias_values(plan, new_biases, biases), change)


def _relative(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """‖differences‖/‖values‖ over all pairs (difference, value)."""
    squares = [torch.stack([difference.square().sum(), value.square().sum()]) for difference, value in pairs]
    difference, value = torch.stack(squares).sum(0)
    return float((difference / value).sqrt())


def _select(plan: Plan, role: str, stacks: Mapping[str, Tensor]) -> Tensor:
    """The heads of one role, over all projections, in their order."""
    return torch.cat([stacks[p.path][_where(p, role)] for p in plan.projections if role in p.roles])


def _place(plan: Plan, query: Tensor, key: Tensor) -> dict[str, Stack]:
    """Inverse of `_select`: heads of both roles back into one stack per projection."""
    left, placed = {"q": query, "k": key}, {}
    for p in plan.projections:
        roles = set(p.roles)
        shape = left[min(roles)].shape[1:]
        stack = query.new_empty(len(p.roles), *shape)
        for role in roles:
            here = _where(p, role)
            stack[here], left[role] = left[role][: len(here)], left[role][len(here) :]
        placed[p.path] = [stack]
    return placed


def _where(projection: Projection, role: str) -> list[int]:
    return [i for i, other in enumerate(projection.roles) if other == role]


def _bias_stack(plan: Plan, projection: Projection, biases: Mapping[str, Tensor]) -> Tensor:
    """Biases (n, r) of a projection's heads: its own, or those that the attention module adds by role."""
    width = projection.rows.widths[0]
    if projection.bias is not None:
        (stack,), _ = projection.rows.split(exact(biases[projection.bias]).unsqueeze(1))
        return stack.squeeze(1)
    stack = torch.zeros(len(projection.roles), width, dtype=torch.float64)
    for role, path in plan.biases.items():
        if role in projection.roles:
            stack[_where(projection, role)] = exact(biases[path]).view(-1, width)
    return stack


def _bias_values(plan: Plan, stacks: Mapping[str, Stack], biases: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The biases as the module holds them, rows that are not a query's or key's untouched."""
    values: dict[str, Tensor] = {}
    for p in plan.projections:
        (stack,) = stacks[p.path]
        if p.bias is not None:
            old = biases[p.bias]
            _, rest = p.rows.split(old.detach().unsqueeze(1))
            heads = stack.to(old.device, old.dtype).unsqueeze(-1)
            values[p.bias] = p.rows.join([heads], rest).squeeze(1)
            continue
        for role, path in plan.biases.items():
            if role in p.roles:
                values[path] = stack[_where(p, role)].flatten().to(biases[path])
    return values
