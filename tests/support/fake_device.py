"""Frames on a CUDA device that is not there, and what a step would launch, move and hold on it.

Fake tensors have shapes, types and devices and no memory: operations that mix devices, read values or allocate on the
wrong device fail as on a real one.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stiefel_geo import PolarStiefel

# Operations that launch nothing: views and allocations.
FREE = {
    *("view", "_unsafe_view", "select", "slice", "split", "split_with_sizes", "transpose", "t", "permute", "expand"),
    *("unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "diagonal", "chunk", "_reshape_alias"),
    *("empty", "new_empty", "empty_strided", "empty_like", "lift_fresh"),
}
VITS = {
    "Ti": (192, 12, 3),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
}  # width, layers, heads of width 64
HELD = {"Ti": 5.67, "S": 5.34, "B": 0.8, "L": 0.8}  # the most memory that a step holds beside the frames, over theirs


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory(tree: object) -> dict[tuple[object, ...], int]:
    """Bytes of every stretch of memory that a tensor of `tree` covers."""
    return {
        (t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.numel() * t.element_size() for t in tensors(tree)
    }


class Costs(TorchDispatchMode):
    """Launches, bytes read and written, and the most bytes held at once, as the dispatcher sees them.

    A foreach operation counts as one launch, and a matrix product reads each of its operands once. What torch does
    inside of an operation is added: `vector_norm` in another type casts first, one launch and two passes more and a
    copy that is held while it runs, and `baddbmm` out of place copies what it adds to.
    """

    def __init__(self, known: object) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in tensors(known)}
        self.launches: Counter[str] = Counter()
        self.bytes = self.held = self.peak = 0
        self.size = 1  # bytes of the frames

    @property
    def moved(self) -> float:
        return self.bytes / self.size

    @property
    def transient(self) -> float:
        return self.peak / self.size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and name not in FREE and any(t.device.type != "cpu" for t in tensors((args, out))):
            self.launches[name] += 1
            self._traffic(name, args, kwargs, out)
        for tensor in tensors(out):
            self._hold(tensor)
        return out

    def _traffic(self, name: str, args: Any, kwargs: dict[str, Any], out: object) -> None:
        overwrites = name.endswith("copy_") or kwargs.get("beta") == 0
        read = memory((args[1:] if overwrites else args, {k: v for k, v in kwargs.items() if k != "out"}))
        written = memory(args[0] if name.endswith("_") else out)
        self.bytes += sum(read.values()) + sum(written.values())
        if name == "linalg_vector_norm" and kwargs.get("dtype", args[0].dtype) != args[0].dtype:
            cast = 8 * args[0].numel()
            self.launches["cast"] += 1
            self.bytes += 2 * cast
            self.peak = max(self.peak, self.held + cast)
        if name == "baddbmm" and kwargs.get("out") is not args[0]:
            self.launches["copy"] += 1
            self.bytes += 2 * sum(memory(args[0]).values())

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, cdata: int, nbytes: int) -> None:
        self.known.discard(cdata)
        self.held -= nbytes


def fake_frames(
    vit: str, dtype: torch.dtype = torch.float32, *, layers: int | None = None, device: str = "cuda"
) -> list[nn.Parameter]:
    """The frames of a patched ViT with gradients; within a FakeTensorMode."""
    d, depth, heads = VITS[vit]
    made = [nn.Parameter(torch.empty(2 * heads, d, 64, dtype=dtype, device=device)) for _ in range(layers or depth)]
    for p in made:
        p.manifold = PolarStiefel()  # type: ignore[attr-defined]  # a fake tensor is of no class of geoopt's
        p.grad = torch.empty_like(p)
    return made


def costs(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Costs:
    """Those of the second step, when all state is there."""
    optimizer.step()
    counted = Costs((list(params), [p.grad for p in params], [list(s.values()) for s in optimizer.state.values()]))
    with counted:
        optimizer.step()
    return counted
