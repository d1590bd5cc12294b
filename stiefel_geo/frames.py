"""Weight ↔ frames and cores: the two lossless factorisations, and the parametrization that carries them.

A head's projection is W ∈ R^{d×r}, q = x·W + b, stored by PyTorch as the r rows Wᵀ of a (rows, d) weight.
It becomes W = F·C with F ∈ St(d, r) and a core C, by one of

    polar      F = W(WᵀW)^{−1/2}, C = (WᵀW)^{1/2}          whatever follows the projection
    canonical  W_Q W_Kᵀ = U Σ Vᵀ; F_Q = U, F_K = V, C = √Σ  where the logits are plain q·k

Everything is factorised in float64 on the CPU, so equal weights give equal frames on every device.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import geoopt
import torch
from torch import Tensor, nn

from . import stiefel
from .assembled import Watch, watching
from .layouts import Rows
from .manifold import PolarStiefel
from .sharding import is_sharded

NEAR_SINGULAR = 1e-6  # σ_r/σ_1 of W_Q W_Kᵀ below which √Σ and the bias transform lose digits: polar instead


class Canonical(NamedTuple):
    """Frames (h, d, r), the square roots √Σ (h, r), and the biases (h, r) in the new gauge."""

    query: Tensor
    key: Tensor
    root: Tensor
    query_bias: Tensor
    key_bias: Tensor


def polar(W: Tensor) -> tuple[Tensor, Tensor]:
    """Frames F (n, d, r) and symmetric cores C (n, r, r) with W = F·C, by W = QR, R = U Σ Vᵀ, F = QUVᵀ."""
    Q, R = torch.linalg.qr(W)
    U, S, Vh = torch.linalg.svd(R)
    return Q @ (U @ Vh), stiefel.sym(Vh.mT @ (S.unsqueeze(-1) * Vh))


def canonical(W_Q: Tensor, W_K: Tensor, b_Q: Tensor, b_K: Tensor) -> Canonical | None:
    """W_Q W_Kᵀ = U Σ Vᵀ per head, and the biases in its gauge; None where a product is near-singular.

    W_Q = Q₁R₁, W_K = Q₂R₂, R₁R₂ᵀ = AΣBᵀ give U = Q₁A, V = Q₂B. The gauge W_Q → W_Q·M = U√Σ, W_K → W_K·M⁻ᵀ
    leaves every logit as it is with M = R₂ᵀBΣ^{−1/2}, M⁻ᵀ = R₁ᵀAΣ^{−1/2}: neither R is inverted.
    Signs: the largest entry of every column of U is positive.
    """
    Q_1, R_1 = torch.linalg.qr(W_Q)
    Q_2, R_2 = torch.linalg.qr(W_K)
    A, S, Bh = torch.linalg.svd(R_1 @ R_2.mT)
    if bool((S[:, -1] <= NEAR_SINGULAR * S[:, 0]).any()):
        return None
    U, B = Q_1 @ A, Bh.mT
    sign = U.gather(1, U.abs().argmax(1, keepdim=True)).sign()  # (h, 1, r)
    A, B, root = A * sign, B * sign, S.sqrt()
    b_Q = (b_Q.unsqueeze(1) @ R_2.mT @ B).squeeze(1) / root
    b_K = (b_K.unsqueeze(1) @ R_1.mT @ A).squeeze(1) / root
    return Canonical(U * sign, Q_2 @ B, root, b_Q, b_K)


def as_frames(data: Tensor, requires_grad: bool = True) -> geoopt.ManifoldParameter:
    """`data` (n, d, r) as a ManifoldParameter, without geoopt's check that meta and half tensors fail."""
    instance = torch.Tensor._make_subclass(geoopt.ManifoldParameter, data.detach(), requires_grad)
    instance.manifold = PolarStiefel()
    return instance


def retire(parameter: Tensor, replaced_by: str) -> None:
    """Mark a parameter that left its model, so that an optimizer which still holds it can say so."""
    sentence = f"this parameter was replaced by {replaced_by}; build the optimizer after it"
    parameter._stiefel_geo_retired = sentence  # type: ignore[attr-defined]


IDENTITY_WRITE = (
    'core="identity" leaves frames alone in the projection, and a weight in general is not one; unpatch(model), '
    "assign the weight, and patch(model, core=...) again."
)


class FrameRows(nn.Module):
    """Parametrization of one projection's weight: rows (F·C)ᵀ of every head, and the rest as it was.

    Parameters: `frames` (n, d, r) on PolarStiefel, in the order of the weight's rows; `core`, diagonal (n, r),
    symmetric (n, r, r) or absent; `rest` (m, d), the value and other rows. Where heads have several widths
    there are `frames0`, `core0`, `frames1`, …
    A frozen core is a buffer, so that `model.requires_grad_()` does not thaw it.
    Frames of half-precision weights are float32 and the assembled weight is cast: an orthonormal basis
    rounded to bfloat16 is orthonormal only to 1e-2.
    """

    def __init__(self, rows: Rows, weight: Tensor, core: str) -> None:
        super().__init__()
        self.rows, self.shape, self.dtype, self.core_mode = rows, weight.shape, weight.dtype, core
        self.stacks = len(rows.roles)
        self._live = False  # right_inverse is silent until the frames are in
        self._watch = Watch()
        self.order: tuple[str, ...] = ()  # the owner's parameters as they stood, for plain keys in plain order
        _, rest = rows.split(weight.detach().flatten(1))
        self.rest = None if rest is None else nn.Parameter(rest.clone(), weight.requires_grad)

    def _names(self, kind: str) -> list[str]:
        return [kind] if self.stacks == 1 else [f"{kind}{i}" for i in range(self.stacks)]

    def named_frames(self) -> list[tuple[str, geoopt.ManifoldParameter]]:
        """Names and frames, one per head width."""
        return [(name, getattr(self, name)) for name in self._names("frames")]

    def named_cores(self) -> list[tuple[str, Tensor]]:
        """Names and cores; empty for core="identity"."""
        return [(name, getattr(self, name)) for name in self._names("core") if hasattr(self, name)]

    def put(self, frames: Sequence[Tensor], cores: Sequence[Tensor], weight: Tensor) -> None:
        """Take the first frames and cores, as the factorisation made them of `weight`."""
        for name, value in zip(self._names("frames"), frames, strict=True):
            self.register_parameter(name, as_frames(self.stored(value, weight), weight.requires_grad))
        if self.core_mode != "identity":
            for name, value in zip(self._names("core"), cores, strict=True):
                self._put_core(name, self.stored(value, weight), weight.requires_grad)

    def stored(self, value: Tensor, weight: Tensor) -> Tensor:
        """A frame or core as it is stored for `weight`: float32 at least, on its device."""
        return value.to(weight.device, torch.promote_types(weight.dtype, torch.float32)).contiguous()

    def _put_core(self, name: str, value: Tensor, requires_grad: bool) -> None:
        if self.core_mode == "freeze":
            self.register_buffer(name, value)
        else:
            setattr(self, name, nn.Parameter(value, requires_grad))

    def update(self, frames: Sequence[Tensor], cores: Sequence[Tensor], weight: Tensor) -> None:
        """Take another weight into the same parameters, which an optimizer may hold already."""
        for (_, parameter), value in zip(self.named_frames(), frames, strict=True):
            parameter.data.copy_(value)
        for (name, core), value in zip(self.named_cores(), cores, strict=False):
            self._fit_core(name, core, value)
            getattr(self, name).data.copy_(value)
        _, rest = self.rows.split(weight.detach().flatten(1))
        if self.rest is not None and rest is not None:
            self.rest.data.copy_(rest)
        self._watch.forget()

    def _fit_core(self, name: str, core: Tensor, value: Tensor) -> None:
        """Make room for a core of the other form: diagonal (n, r) where symmetric (n, r, r) was, or back."""
        n, r = core.shape[:2]
        if value.shape != core.shape and value.shape in ((n, r), (n, r, r)):
            retire(core, "a core of another form, which the new weights need")
            self._put_core(name, core.new_empty(value.shape), core.requires_grad)

    def forward(self) -> Tensor:
        """The weight, in its own shape and dtype."""
        if not watching():
            return self.assemble()
        self._watch.refuse_lost_write()
        return self._watch.hand_out(self.assemble())

    def assemble(self) -> Tensor:
        cores: list[Tensor | None] = [core for _, core in self.named_cores()]
        cores = cores or [None] * self.stacks
        frames = [F for _, F in self.named_frames()]
        # FSDP2's mixed precision hands frames out in half precision, whatever they are stored in.
        dtype = frames[0].dtype if frames[0].element_size() == 2 else self.dtype
        heads = [_head_rows(F, C).to(dtype) for F, C in zip(frames, cores, strict=True)]
        return self.rows.join(heads, self.rest).reshape(self.shape)

    def right_inverse(self, weight: Tensor) -> tuple[()]:
        """`module.weight = tensor`: polar factors of its heads, whatever the gauge of the biases."""
        if self._live:
            self._take(weight)
        self._live = True
        return ()

    def _take(self, weight: Tensor) -> None:
        if weight.shape != self.shape:
            raise ValueError(f"The weight has shape {tuple(self.shape)}; got {tuple(weight.shape)}.")
        if self.core_mode == "identity":
            raise RuntimeError(IDENTITY_WRITE)
        factors = [polar(exact(stack)) for stack in self.rows.split(weight.detach().flatten(1))[0]]
        self.update([F for F, _ in factors], [C for _, C in factors], weight)

    def refuse_lost_write(self) -> None:
        """Raise if the weight that the last forward handed out was written to."""
        self._watch.refuse_lost_write()

    def _rewrap(self) -> None:
        """Frames stay ManifoldParameters where PyTorch puts plain ones: to_empty, load_state_dict(assign=True)."""
        for name, value in self.named_frames():
            if not isinstance(value, geoopt.ManifoldParameter) and not is_sharded(value):
                self._parameters[name] = as_frames(value, value.requires_grad)
        for name, value in [*self.named_frames(), *self.named_cores()]:
            self._mark(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """As always; FSDP2 puts its sharded parameters in by this, since it is overridden."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            self._mark(name, value)

    def _mark(self, name: str, value: Any) -> None:
        """Tell the optimizer what a parameter's class does not: FSDP2's are plain, and cores are never decayed."""
        if name in self._names("core"):
            value._stiefel_geo_core = True
        elif name in self._names("frames") and not isinstance(value, geoopt.ManifoldParameter):
            value.manifold = PolarStiefel()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = torch.empty(0, dtype=self.dtype, device=self.named_frames()[0][1].device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(probe).dtype
        self._rewrap()
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        self.refuse_lost_write()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, core in self.named_cores():
            if prefix + name in state_dict:
                self._fit_core(name, core, state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._rewrap()
        self._watch.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        replica = self.__new__(type(self))
        memo[id(self)] = replica
        replica.__dict__ = copy.deepcopy(self.__dict__, memo)
        replica._rewrap()
        return replica

    def extra_repr(self) -> str:
        shapes = ", ".join(str(tuple(F.shape)) for _, F in self.named_frames())
        return f"frames={shapes}, core={self.core_mode}, weight={tuple(self.shape)}"


def exact(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU, where everything is factorised."""
    return tensor.detach().to("cpu", torch.float64)


def _head_rows(F: Tensor, C: Tensor | None) -> Tensor:
    """(F·C)ᵀ, shape (n, r, d)."""
    Ft = F.transpose(-2, -1)  # the TorchScript ONNX exporter, timm's default, does not know .mT
    if C is None:
        return Ft
    if C.dim() == 2:
        return Ft * C.unsqueeze(-1)
    C = (C + C.transpose(-2, -1)) / 2
    if F.is_meta or not torch.is_autocast_enabled(F.device.type):
        return C @ Ft
    with torch.autocast(F.device.type, enabled=False):  # the weight is rounded once, not its factors
        return C @ Ft
