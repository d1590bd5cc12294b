"""Read-only measurements of a live model or optimizer, for anyone's training loop.

    before = diagnostics.snapshot(model)
    optimizer.step()
    diagnostics.movement(model, before)      # how far every frame went
    diagnostics.gauge_drift(model, before)   # how much of that no logit can see

Patched and plain models are measured alike: where a patched model has a frame (d, r), a plain one has that
head's query or key matrix of the same shape. Results are dictionaries by name of float64 tensors on the
model's device; nothing is written, no gradient is recorded, no weight is assembled where a write to it is watched.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import stiefel
from .carrying import plain_weights, plan_of
from .layouts import LayoutError, find
from .patching import frames, load_table
from .projections import Plan, Projection
from .sharding import local


class Snapshot(NamedTuple):
    """Copies of a model's query and key matrices at one moment."""

    matrices: dict[str, Tensor]  # (n, d, r): frames, or the heads of a plain weight
    pairs: dict[str, tuple[Tensor, Tensor]]  # attention module → W_Q, W_K (heads, d, r), cores included


class Counts(NamedTuple):
    """What happened to every frame that an optimizer drives, each (N,) int64 on the CPU."""

    steps: Tensor
    capped: Tensor  # steps that the trust region shortened
    skipped: Tensor  # steps left out because the gradient was not finite


@torch.no_grad()
def defect(model: nn.Module) -> dict[str, Tensor]:
    """‖WᵀW − I‖_F of every frame (n,), by the names of `stiefel_geo.frames`; of those on this rank under FSDP2."""
    return {name: stiefel.defect(local(frame)) for name, frame in frames(model)}


@torch.no_grad()
def snapshot(model: nn.Module) -> Snapshot:
    """Copies to measure `movement` and `gauge_drift` against."""
    matrices = {name: W.detach().clone() for name, W in _matrices(model)}
    return Snapshot(matrices, dict(_pairs(model)))


@torch.no_grad()
def movement(model: nn.Module, before: Snapshot) -> dict[str, Tensor]:
    """‖W − W_before‖_F of every frame, or of every head's query and key matrix in a plain model, (n,)."""
    return {name: _length(W.double() - before.matrices[name].double()) for name, W in _matrices(model)}


@torch.no_grad()
def spectrum(model: nn.Module) -> dict[str, Tensor]:
    """Singular values of every head's query and key matrix (n, r), descending: those of its core if it is patched.

    A patched matrix is W = F·C with orthonormal F, so the core alone has all of them; ones for core="identity".
    """
    found: dict[str, Tensor] = {}
    for name, projection in _projections(model):
        carried = projection.frame_rows
        if carried is None:
            values = [torch.linalg.svdvals(W.double()) for W in _heads(projection)]
        elif not (cores := carried.named_cores()):
            values = [
                torch.ones(len(F), F.shape[-1], device=F.device, dtype=torch.float64) for _, F in carried.named_frames()
            ]
        else:
            values = [_core_values(core.double()) for _, core in cores]
        found |= dict(zip(_numbered(name, len(values)), values, strict=True))
    return found


@torch.no_grad()
def gauge_drift(model: nn.Module, before: Snapshot) -> dict[str, Tensor]:
    """Share of each head's movement since `before` that lies along its gauge orbit, (heads,), from 0 to 1.

    (W_Q A, W_K A⁻ᵀ) gives the same logits for every A ∈ GL(r): movement along the orbit is seen by no loss.
    Only modules whose logits are plain q·k have this gauge, and only they are listed. Weights alone are
    measured; biases, which move along, are not.
    """
    drift = {}
    for name, (W_Q, W_K) in _pairs(model):
        Q, K = (W.double() for W in before.pairs[name])
        drift[name] = orbit_share(Q, K, W_Q.double() - Q, W_K.double() - K)
    return drift


def counts(optimizer: torch.optim.Optimizer) -> Counts:
    """Steps, cap hits and skips of every frame, in the order of the optimizer's parameters. Waits for the device."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    states = [optimizer.state[p] for p in params if "capped" in optimizer.state.get(p, {})]
    columns = ([state[key].flatten().long().cpu() for state in states] for key in ("step", "capped", "skipped"))
    return Counts(*(torch.cat(column) if column else torch.zeros(0, dtype=torch.long) for column in columns))


def orbit_share(Q: Tensor, K: Tensor, dQ: Tensor, dK: Tensor) -> Tensor:
    """‖part of (dQ, dK) along {(QB, −KBᵀ)}‖/‖(dQ, dK)‖, shapes (..., d, r) → (...); 0 where nothing moved.

    The nearest B solves the Sylvester equation QᵀQ·B + B·KᵀK = QᵀdQ − dKᵀK, here by two eigendecompositions.
    """
    a, E = torch.linalg.eigh(Q.mT @ Q)
    b, F = torch.linalg.eigh(K.mT @ K)
    C = E.mT @ (Q.mT @ dQ - dK.mT @ K) @ F
    B = E @ (C / (a.unsqueeze(-1) + b.unsqueeze(-2)).clamp(min=torch.finfo(Q.dtype).tiny)) @ F.mT
    along = torch.hypot(_length(Q @ B), _length(K @ B.mT))
    total = torch.hypot(_length(dQ), _length(dK))
    return torch.where(total == 0, 0.0, along / total)


def _length(X: Tensor) -> Tensor:
    length: Tensor = torch.linalg.matrix_norm(X)
    return length


def _core_values(core: Tensor) -> Tensor:
    """Singular values of a diagonal core (n, r) or of the symmetric part, which is what is used, of (n, r, r)."""
    if core.dim() == 2:
        return core.abs().sort(descending=True).values
    values: Tensor = torch.linalg.svdvals(stiefel.sym(core))
    return values


def _plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, Plan]]:
    """Every attention module whose query and key rows are known."""
    load_table()
    for name, module in model.named_modules():
        if find(module) is not None:
            try:
                yield name, module, plan_of(module)
            except LayoutError:
                continue


def _projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    for prefix, _, plan in _plans(model):
        for projection in plan.projections:
            yield f"{prefix}.{projection.key}".removeprefix("."), projection


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and matrices (n, d, r), one per head width of a projection."""
    for name, projection in _projections(model):
        carried = projection.frame_rows
        stacks = _heads(projection) if carried is None else [F for _, F in carried.named_frames()]
        yield from zip(_numbered(name, len(stacks)), stacks, strict=True)


def _heads(projection: Projection) -> list[Tensor]:
    """Head matrices (n, d, r) of a plain projection's weight."""
    weight: Tensor = getattr(projection.owner, projection.tensor)
    return projection.rows.split(weight.detach().flatten(1))[0]


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]


def _pairs(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Attention modules with a gauge, and fresh copies of their W_Q, W_K (heads, d, r)."""
    for name, _, plan in _plans(model):
        if plan.plain:
            yield name, (_role(plan, "q"), _role(plan, "k"))


def _role(plan: Plan, role: str) -> Tensor:
    weights = plain_weights(plan)
    parts = []
    for projection in plan.projections:
        (stack,), _ = projection.rows.split(weights[projection.path].flatten(1))
        parts.append(stack[[i for i, other in enumerate(projection.roles) if other == role]])
    return torch.cat(parts)
