"""ScaleFreeRiemannianAdam: parameter groups, state and batching. The formulas are in `step.py`."""

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from . import batching, riemannian
from .checks import (
    check_compilable,
    check_gradient,
    check_live,
    check_lr_scales,
    check_parameter,
    check_plain,
    check_settings,
    check_state,
    is_core,
    is_frame,
    is_other_point,
)
from .loading import careful_loading
from .step import Settings

# What `_init_group` sorts parameters into: the lists of batching.FrameLists, and those of torch's adamw, twice:
# for the cores of patched projections, which are never decayed, and for all else.
FRAME_LISTS = len(batching.FrameLists._fields)
PLAIN_LISTS = 5


class ScaleFreeRiemannianAdam(Optimizer):
    """Riemannian Adam with ONE scalar second moment per frame, a trust region and the polar retraction.

    For every frame W of a `geoopt.ManifoldParameter` of shape (..., d, r) on `PolarStiefel` or
    `geoopt.EuclideanStiefel`, with Euclidean gradient G::

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
        foreach: False steps one parameter at a time; otherwise frames of equal shape go through as one batch.
        capturable: keep AdamW's step counters on the device, for CUDA graphs.

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
        }
        check_settings(defaults)
        super().__init__(params, defaults)

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
        work = []
        for group in self.param_groups:  # all of them before the first moves, so that a refusal changes nothing
            points: list[Tensor] = []
            frames: list[list[Tensor]] = [[] for _ in range(FRAME_LISTS)]
            cores: list[list[Tensor]] = [[] for _ in range(PLAIN_LISTS)]
            plain: list[list[Tensor]] = [[] for _ in range(PLAIN_LISTS)]
            self._init_group(group, torch.compiler.is_compiling(), points, *frames, *cores, *plain)
            work.append((group, points, frames, cores, plain))
        for group, points, frames, cores, plain in work:
            if frames[0]:
                join = group["foreach"] is not False
                batching.step_(batching.FrameLists(*frames), _settings(group), join=join)
            for p in points:
                riemannian.step_(p, self.state[p], _settings(group))
            if cores[0]:
                _step_plain({**group, "weight_decay": 0.0}, *cores)
            if plain[0]:
                _step_plain(group, *plain)
        return loss

    def _init_group(self, group: dict[str, Any], compiling: bool, points: list[Tensor], *lists: list[Tensor]) -> None:
        """Sort the parameters that have a gradient into lists, and make the state of those that have none yet.

        torch.compile runs this method in Python, so the types of parameters are asked here and nowhere else.
        """
        if compiling:
            check_compilable(group)
        if not self.state:
            check_lr_scales(self.param_groups)
        frames, cores = batching.FrameLists(*lists[:FRAME_LISTS]), lists[FRAME_LISTS:-PLAIN_LISTS]
        plain = lists[-PLAIN_LISTS:]
        for p in group["params"]:
            check_live(p)
            if p.grad is None:
                continue
            check_gradient(p)
            state = self.state[p]
            if not state:
                state.update(_new_state(p, group["capturable"]))
            check_state(p, state)
            check_plain(p, state, group, compiling)
            if is_frame(p):
                frames.add(p, state)
            elif is_other_point(p):
                points.append(p)
            else:
                entries = (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
                for target, entry in zip(cores if is_core(p) else plain, entries, strict=True):
                    target.append(entry)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that this optimizer saved; entries of other names or shapes are refused."""
        with careful_loading(self, _new_state):
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


def _settings(group: dict[str, Any]) -> Settings:
    beta1, beta2 = group["betas"]
    return Settings(group["lr"], beta1, beta2, group["trust_radius"], group["maximize"])


def _new_state(p: Tensor, capturable: bool) -> dict[str, Tensor]:
    """State of a parameter before its first step; that of a plain one is made as `torch.optim.AdamW` makes it."""
    if is_frame(p):
        return batching.new_state(p)
    if is_other_point(p):
        return riemannian.new_state(p)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device if capturable else "cpu"),
        "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
    }


def _step_plain(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
) -> None:
    """torch's own AdamW on the Euclidean parameters."""
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=group["foreach"],
        capturable=group["capturable"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
