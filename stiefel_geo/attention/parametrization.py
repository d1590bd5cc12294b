"""FrameRows: the parametrization that makes one projection's weight from frames, cores and the remaining rows."""

from collections.abc import Callable
from typing import Any, Self

import geoopt
import torch
from torch import Tensor, nn

from .. import stiefel
from ..manifold import PolarStiefel
from ..precision import full_precision
from .factorisation import exact, polar, whole
from .layouts import Rows
from .lost_writes import Watch, watching

ONE_GRAPH_FROM = "2.8"  # the compiler of 2.6 and 2.7 knows no tensor subclass such as geoopt's parameters
IDENTITY_WRITE = (
    'core="identity" leaves frames alone in the projection, and a weight in general is not one; unpatch(model), '
    "assign the weight, and patch(model, core=...) again."
)


class FrameParameters(dict[str, nn.Parameter | None]):
    """FrameRows' parameters by name. What is put under a frame's name is a frame, whoever puts it there.

    `to_empty`, `load_state_dict(assign=True)`, FSDP2 and accelerate make parameters of their own kind. The object
    that they put stays the one that they hold; it only learns what it is. `unproven`: something real took the place
    of a meta frame, and nobody has said that it is one.
    """

    unproven = False

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        before = self.get(name)
        self.unproven |= before is not None and before.is_meta and value is not None and not value.is_meta
        if isinstance(value, nn.Parameter):
            if name.startswith("frames"):
                _as_frames_(value)
            elif name.startswith("core"):
                value._stiefel_geo_core = True  # type: ignore[attr-defined]  # never decayed
        super().__setitem__(name, value)


def _as_frames_(parameter: Any) -> None:
    if type(parameter) is nn.Parameter:
        parameter.__class__ = geoopt.ManifoldParameter  # without geoopt's check, which meta and half tensors fail
    if not isinstance(getattr(parameter, "manifold", None), geoopt.Stiefel):
        parameter.manifold = PolarStiefel()


class FrameRows(nn.Module):
    """Parametrization of one projection's weight: rows (F·C)ᵀ of every head, and the rest as it was.

    Parameters: `frames` (n, d, r) on PolarStiefel, in the order of the weight's rows; `core`, symmetric (n, r, r),
    or absent; `rest` (m, d), the value and other rows. Where heads have several widths there are `frames0`, `core0`,
    `frames1`, … Their identities and shapes never change, whatever weight they take.
    A frozen core is a buffer, so that `model.requires_grad_()` does not thaw it.
    Frames of half-precision weights are float32 and the assembled weight is cast: an orthonormal basis
    rounded to bfloat16 is orthonormal only to 1e-2.
    """

    frames: geoopt.ManifoldParameter  # of one head width; several have names with numbers
    core: Tensor
    rest: nn.Parameter | None
    _parameters: FrameParameters

    def __init__(self, rows: Rows, weight: Tensor, core: str) -> None:
        super().__init__()
        self._parameters = FrameParameters()
        self.rows, self.shape, self.dtype, self.core_mode = rows, weight.shape, weight.dtype, core
        self.stacks = len(rows.roles)
        self.order: tuple[str, ...] = ()  # the owner's parameters as they stood, for plain keys in plain order
        self._watch = Watch()
        self.lost = (0.0, 1.0)  # ‖W − F‖² and ‖W‖² over all heads, for core="identity"
        self.register_parameter("rest", None)
        for name, value in self.factors(weight).items():
            if name.startswith("core") and core == "freeze":
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, weight.requires_grad))
        if core == "identity":
            self.lost = self._distance(weight)

    def _names(self, kind: str) -> list[str]:
        return [kind] if self.stacks == 1 else [f"{kind}{i}" for i in range(self.stacks)]

    def named_frames(self) -> list[tuple[str, geoopt.ManifoldParameter]]:
        """Names and frames, one per head width."""
        return [(name, getattr(self, name)) for name in self._names("frames")]

    def named_cores(self) -> list[tuple[str, Tensor]]:
        """Names and cores; empty for core="identity"."""
        return [] if self.core_mode == "identity" else [(name, getattr(self, name)) for name in self._names("core")]

    # --- weight → frames, cores, rest ---

    def factors(self, weight: Tensor) -> dict[str, Tensor]:
        """What `weight` puts under each name: frames and cores in float32 at least, the other rows as they are."""
        stacks, rest = self.rows.split(weight.detach().flatten(1))
        if weight.is_meta:
            pairs = [(W, W.new_empty(len(W), W.shape[-1], W.shape[-1])) for W in stacks]
        else:
            pairs = [polar(exact(W)) for W in stacks]
        values = dict(zip(self._names("frames"), (F for F, _ in pairs), strict=True))
        if self.core_mode != "identity":
            values |= dict(zip(self._names("core"), (C for _, C in pairs), strict=True))
        dtype = torch.promote_types(weight.dtype, torch.float32)
        values = {name: value.to(weight.device, dtype).contiguous() for name, value in values.items()}
        return values if rest is None else values | {"rest": rest.clone()}

    def _distance(self, weight: Tensor) -> tuple[float, float]:
        stacks, _ = self.rows.split(weight.detach().flatten(1))
        if weight.is_meta:
            return float("nan"), 1.0
        pairs = [(exact(W), exact(F)) for W, (_, F) in zip(stacks, self.named_frames(), strict=True)]
        return sum(float((W - F).square().sum()) for W, F in pairs), sum(float(W.square().sum()) for W, _ in pairs)

    def take(self, values: dict[str, Tensor]) -> None:
        """Put other values into the same parameters, which an optimizer may hold already."""
        for name, value in values.items():
            getattr(self, name).data.copy_(value)
        self._watch.forget()

    def right_inverse(self, weight: Tensor) -> tuple[()]:
        """`module.weight = tensor`. What is installed over a parameter was made from it and takes nothing."""
        if not isinstance(weight, nn.Parameter):
            self.assign(weight)
        return ()

    def assign(self, weight: Tensor) -> None:
        """Take another weight; or the very one that another stood in for, to the last bit (functional_call)."""
        self._watch.forget()  # `weight.data += tensor` writes before it assigns
        before = getattr(weight, "before", None)
        if before is None:
            self._check_assigned(weight)
            before = self.factors(weight)
            if (replaced := self._watch.in_use()) is not None:
                replaced.before = {name: getattr(self, name).detach().clone() for name in before}
        self.take(before)

    def _check_assigned(self, weight: Tensor) -> None:
        if weight.shape != self.shape:
            raise ValueError(f"The weight has shape {tuple(self.shape)}; got {tuple(weight.shape)}.")
        if weight.requires_grad or not watching():
            raise RuntimeError(
                "rule: frames take the values of a weight, and no gradient goes back through that; found a weight with "
                "a graph or a transform around it; detach it, or name frames, cores and rest as named_parameters() does"
            )
        if self.core_mode == "identity":
            raise RuntimeError(IDENTITY_WRITE)

    # --- frames, cores, rest → weight ---

    def __call__(self) -> Tensor:
        """Without hooks: those that tools put on every module expect an input, and this has none."""
        return self.forward()

    def forward(self) -> Tensor:
        """The weight, in its own shape and dtype."""
        if not watching():
            return self.assemble()
        self._watch.refuse_lost_write()
        self._prove_frames()
        if not torch.is_inference_mode_enabled():
            return self._watch.hand_out(self.assemble(), self.assign)
        with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count their writes
            return self._watch.hand_out(self.assemble(), self.assign)

    def assemble(self) -> Tensor:
        frames = [F for _, F in self.named_frames()]
        cores: list[Tensor | None] = [C for _, C in self.named_cores()]
        cores = cores or [None] * self.stacks
        # FSDP2's mixed precision hands frames out in half precision, whatever they are stored in.
        dtype = frames[0].dtype if frames[0].dtype.itemsize == 2 else self.dtype
        heads = [_head_rows(F, C).to(dtype) for F, C in zip(frames, cores, strict=True)]
        return self.rows.join(heads, self.rest).reshape(self.shape)

    def fold(self) -> Tensor:
        """The weight as a copy for keeps: multiplied in float64, gathered from all ranks, other rows bit for bit."""
        self._watch.refuse_lost_write()
        frames = [F for _, F in self.named_frames()]
        if (device := frames[0].device).type == "meta":
            return self.assemble().detach()
        cores: list[Tensor | None] = [exact(C) for _, C in self.named_cores()]
        cores = cores or [None] * self.stacks
        heads = [_head_rows(exact(F), C).to(device, self.dtype) for F, C in zip(frames, cores, strict=True)]
        return self.rows.join(heads, None if self.rest is None else whole(self.rest)).reshape(self.shape)

    # --- what PyTorch does to modules ---

    @property
    def trained(self) -> bool:
        return any(p.requires_grad for name, p in self.named_parameters() if not name.startswith("core"))

    def train(self, mode: bool = True) -> Self:
        """As always; loaders call it last, and it tells frames from the memory that one of them left unset."""
        self._prove_frames()
        return super().train(mode)

    def _prove_frames(self) -> None:
        if self._parameters.unproven and not self.named_frames()[0][1].is_meta:
            defects = [stiefel.defect(whole(F)).max() / F.shape[-1] ** 0.5 for _, F in self.named_frames()]
            if not all(bool(defect < 0.5) for defect in defects):
                raise RuntimeError(
                    "rule: frames are made of a weight; found memory that holds none: whatever loaded the model into "
                    "place (from_pretrained) does not know plain keys; load first and patch(model) then"
                )
            self._parameters.unproven = False

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            "rule: TorchScript compiles plain weights; found frames; unpatch(model) first, or use torch.export"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = torch.empty(0, dtype=self.dtype, device=self.named_frames()[0][1].device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype, self._parameters.unproven = fn(probe).dtype, False  # to_empty is followed by a load
        return self

    def refuse_lost_write(self) -> None:
        """Raise if the weight that the last forward handed out was written to."""
        self._watch.refuse_lost_write()

    def _save_to_state_dict(self, *args: Any) -> None:
        self._watch.refuse_lost_write()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._parameters.unproven = False
        self._watch.forget()

    def extra_repr(self) -> str:
        shapes = ", ".join(str(tuple(F.shape)) for _, F in self.named_frames())
        return f"frames={shapes}, core={self.core_mode}, weight={tuple(self.shape)}"


if torch.__version__ < ONE_GRAPH_FROM:  # the model around the weight still compiles
    FrameRows.__call__ = torch.compiler.disable(FrameRows.__call__)  # type: ignore[method-assign]


def _head_rows(F: Tensor, C: Tensor | None) -> Tensor:
    """(F·C)ᵀ, shape (n, r, d), of the symmetric part of C, in the full precision of F."""
    Ft = F.transpose(-2, -1)  # the TorchScript ONNX exporter, timm's default, does not know .mT
    if C is None:
        return Ft
    C = (C + C.transpose(-2, -1)) / 2
    if F.is_meta:
        return C @ Ft
    with full_precision(F.device.type):  # the weight is rounded once, not its factors
        return C @ Ft
