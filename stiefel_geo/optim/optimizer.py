"""ScaleFreeRiemannianAdam: parameter groups, and who steps each kind of parameter. The formulas are in `step.py`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from . import batching, euclidean, riemannian
from .checks import (
    check_compilable,
    check_frames_kept,
    check_gradient,
    check_live,
    check_lr_scales,
    check_parameter,
    check_plain,
    check_settings,
    check_state,
)
from .families import Member, families, lr_of, settings_of
from .kinds import is_core, is_frame, is_other_point
from .loading import careful_loading
from .state import new_state


class ScaleFreeRiemannianAdam(Optimizer):
    """Riemannian Adam with ONE scalar second moment per frame, a trust region and the polar retraction.

    For every frame W of a `geoopt.ManifoldParameter` of shape (..., d, r) on `PolarStiefel` or
    `geoopt.EuclideanStiefel`, with Euclidean gradient G:

        g = G − W·sym(WᵀG)                       m ← P_W(β₁ m + (1−β₁) g)
        v ← β₂ v + (1−β₂) ‖g‖²_F/(d·r)           ξ = −lr · m̂/√v̂, shortened to ‖ξ‖_F ≤ trust_radius
        W ← (W+ξ)((W+ξ)ᵀ(W+ξ))^{−1/2}

    The path of a frame does not depend on the scale of its gradients, rotates with them (O(d) × O(r)), and
    ignores weight decay, which has no tangent part. Every other parameter follows `torch.optim.AdamW` exactly (the
    cores of patched projections with decay 0: decay would switch the attention off);
    a `ManifoldParameter` on another manifold follows the same rule through that manifold's own operations.

    Args:
        params: parameters or parameter groups, as for every torch optimizer.
        lr: RMS change of a frame's entries per step, and AdamW's lr for the others: the same unit, so a tuned
            AdamW value carries over. A float, or a tensor of one element.
        betas: decay rates (β₁, β₂) of the two moments, each in [0, 1).
        eps: AdamW's term, for Euclidean parameters alone; the frames' step has none.
        weight_decay: AdamW's decoupled decay, for Euclidean parameters alone.
        trust_radius: Δ > 0, the longest step of a frame in the Frobenius norm; `math.inf` for none.
        maximize: ascend instead of descend.
        foreach: False steps one parameter at a time, in the least memory; otherwise frames of equal shape go
            through as one batch.
        capturable: allow the step in a CUDA graph, with AdamW's step counters on the device. A graph replays the
            lr that it was captured with: for one that a scheduler changes pass a tensor on the device,
            `lr=torch.tensor(1e-3, device="cuda")`.
        fused: AdamW's fused kernel for Euclidean parameters; None leaves the choice to torch.

    State per frame: `exp_avg` like the frame and one scalar `exp_avg_sq`, with counters `step`, `skipped` (steps
    left out because the gradient was not finite) and `capped` (steps that the trust region shortened). Frames
    in half precision keep a float32 `master` too. A frame with a non-finite gradient stays as it was.

    Raises:
        ValueError: a hyper-parameter out of range, a frame off the manifold, a complex parameter.
        RuntimeError: from `step`, a sparse gradient, a parameter that `patch` replaced, state on another device.

    Source: R. D. Guerrero, "Stiefel Attention" (2026); the unit of lr, the noise floor and the skipping of
    non-finite gradients are this library's choices.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        trust_radius: float = 1.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_radius": trust_radius,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
        }
        check_settings(defaults)
        super().__init__(params, defaults)

    _frames_given = 0  # a copy or an unpickled optimizer has none to compare with

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking its settings and that its frames are on the manifold."""
        check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for p in self.param_groups[-1]["params"]:
                check_parameter(p)
        except ValueError:
            self.param_groups.pop()
            raise
        self._frames_given = self.num_frames

    @property
    def num_frames(self) -> int:
        """How many frames (d×r matrices) this optimizer drives on the Stiefel manifold."""
        params = (p for group in self.param_groups for p in group["params"])
        return sum(math.prod(p.shape[:-2]) for p in params if is_frame(p))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}Frames: {self.num_frames}\n)"

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure`, if given, re-evaluates the model with gradients on and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _check_capture(self)
        work = []
        for group in self.param_groups:  # all of them before the first moves, so that a refusal changes nothing
            frames: list[Tensor] = []
            points: list[Tensor] = []
            cores: list[Tensor] = []
            plain: list[Tensor] = []
            self._init_group(group, torch.compiler.is_compiling(), frames, points, cores, plain)
            work.append((group, frames, points, cores, plain))
        for family in families([(group, frames) for group, frames, *_ in work]):
            self._step_frames(family)
        for group, _, points, cores, plain in work:
            for p in points:
                riemannian.step_(p, self.state[p], settings_of([group]))
            euclidean.step_(cores, self.state, {**group, "weight_decay": 0.0})
            euclidean.step_(plain, self.state, group)
        return loss

    def _init_group(self, group: dict[str, Any], compiling: bool, *kinds: list[Tensor]) -> None:
        """Sort the parameters that have a gradient into frames, points, cores and plain ones, and make new states.

        torch.compile runs this method in Python, so the types of parameters are asked here and nowhere else.
        """
        frames, points, cores, plain = kinds
        if compiling:
            check_compilable(group)
        if not self.state:
            check_lr_scales(self.param_groups)
            check_frames_kept(self._frames_given, self.num_frames)
        for p in group["params"]:
            check_live(p)
            if p.grad is None:
                continue
            check_gradient(p)
            state = self.state[p]
            if not state:
                state.update(new_state(p, group))
            check_state(p, state)
            check_plain(p, state, group, compiling)
            kind = frames if is_frame(p) else points if is_other_point(p) else cores if is_core(p) else plain
            kind.append(p)

    def _step_frames(self, family: Sequence[Member]) -> None:
        """Frames of groups that differ in lr alone."""
        frames = [batching.frames_of(p, self.state[p], lr_of(group)) for group, params in family for p in params]
        join = family[0][0]["foreach"] is not False
        batching.move_(frames, settings_of([group for group, _ in family]), join=join)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that this optimizer saved; entries of other names or shapes are refused."""
        with careful_loading(self):
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Files from before an option existed get its default."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain tensors and numbers, as torch's own optimizers give it."""
        owned = {p for group in self.param_groups for p in group["params"]}
        strangers = [tuple(p.shape) for p in self.state if p not in owned]
        if strangers:
            raise RuntimeError(
                "rule: the optimizer's state belongs to the parameters of its groups; found state for parameters "
                f"of shapes {strangers[:3]} that are in no group, because the groups' lists were replaced after "
                "a step; build a new optimizer for the new parameters"
            )
        return super().state_dict()


def _check_capture(optimizer: Optimizer) -> None:
    """torch's own check that a step in a CUDA graph has capturable=True; older versions have it for CUDA alone."""
    check = getattr(optimizer, "_accelerator_graph_capture_health_check", None)
    (check or optimizer._cuda_graph_capture_health_check)()
