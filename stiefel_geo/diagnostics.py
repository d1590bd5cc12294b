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
from .attention.layouts import LayoutError, find
from .attention.patching import frames
from .attention.projections import Projection, projections_of
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
        made_by = projection.frame_rows
        if made_by is None:
            values = [stiefel.singular_values(W.double()) for W in projection.heads()]
        elif not (cores := made_by.named_cores()):
            values = [
                torch.ones(len(F), F.shape[-1], device=F.device, dtype=torch.float64) for _, F in made_by.named_frames()
            ]
        else:
            values = [torch.linalg.svdvals(stiefel.sym(core.double())) for _, core in cores]
        found |= dict(zip(_numbered(name, len(values)), values, strict=True))
    return found


@torch.no_grad()
def gauge_drift(model: nn.Module, before: Snapshot) -> dict[str, Tensor]:
    """Share of each head's movement since `before` that lies along its gauge orbit, (heads,), from 0 to 1.

    (W_Q A, W_K A⁻ᵀ) gives the same logits q·k for every A ∈ GL(r): movement along the orbit is seen by no loss.
    Where something stands between the projection and the logits (a norm, a rotary embedding, pooling) the share is
    that of the same directions, but there a loss does see them. Listed are the modules that pair every query head
    with a key head of its own. Weights alone are measured; biases, which move along, are not.
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


def _attentions(model: nn.Module) -> Iterator[tuple[str, list[Projection]]]:
    """Every attention module whose query and key rows are known."""
    for name, module in model.named_modules():
        if find(module) is not None:
            try:
                yield name, projections_of(module)
            except LayoutError:
                continue


def _projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    for prefix, projections in _attentions(model):
        for projection in projections:
            yield f"{prefix}.{projection.key}".removeprefix("."), projection


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and matrices (n, d, r), one per head width of a projection."""
    for name, projection in _projections(model):
        made_by = projection.frame_rows
        stacks = projection.heads() if made_by is None else [F for _, F in made_by.named_frames()]
        yield from zip(_numbered(name, len(stacks)), stacks, strict=True)


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]


def _pairs(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Attention modules that pair query and key heads, and fresh copies of their W_Q, W_K (heads, d, r)."""
    for name, projections in _attentions(model):
        W_Q, W_K = (_of_role(projections, role) for role in "qk")
        if len({W.shape for W in (*W_Q, *W_K)}) == 1 and len(W_Q) == len(W_K):
            yield name, (torch.stack(W_Q), torch.stack(W_K))


def _of_role(projections: list[Projection], role: str) -> list[Tensor]:
    """Matrices (d, r) of all heads of one role, in their order."""
    heads = [(own, W) for p in projections for roles, Ws in zip(p.rows.roles, p.heads(), strict=True)
             for own, W in zip(roles, Ws, strict=True)]  # fmt: skip
    return [W for own, W in heads if own == role]
