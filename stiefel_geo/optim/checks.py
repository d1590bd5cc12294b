"""What the optimizer refuses, with the rule, the value found and the remedy in each message."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _get_capturable_supported_devices
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ..precision import describe, is_full
from ..sharding import check_whole_frames, local
from ..stiefel import defect
from .kinds import is_frame, is_half, is_other_point

COMPILING_FROM = "2.14"  # on 2.8 and 2.11 its tests fail inside torch._dynamo
# The largest defect ‖WᵀW − I‖_F/√r of a frame that counts as on the manifold, by how it is stored.
DEFECT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_settings(settings: dict[str, Any]) -> None:
    """Raise ValueError for a hyper-parameter out of its range, TypeError for one that is no number."""
    _check_numbers(settings)
    lr, trust_radius = settings["lr"], settings["trust_radius"]
    beta1, beta2 = settings["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"rule: a tensor lr has one element; found shape {tuple(lr.shape)}; pass a scalar")
    if settings["fused"] and settings["foreach"]:
        raise ValueError("rule: fused and foreach exclude each other; found both True; leave one out")
    _check("lr", lr, "lr ≥ 0 and finite", 0 <= lr < math.inf)
    _check("betas", (beta1, beta2), "0 ≤ β < 1 for both", 0 <= beta1 < 1 and 0 <= beta2 < 1)
    _check("eps", settings["eps"], "eps ≥ 0", 0 <= settings["eps"] < math.inf)
    _check("weight_decay", settings["weight_decay"], "weight_decay ≥ 0", 0 <= settings["weight_decay"] < math.inf)
    _check("trust_radius", trust_radius, "trust_radius > 0 (math.inf for none)", trust_radius > 0)
    if math.isinf(trust_radius) and (beta1**2 >= beta2 > 0 or isinstance(lr, Tensor)):
        raise ValueError(
            "rule: without a trust region the longest step must be known on the host, which takes a float lr and "
            f"β₁² < β₂; found lr {lr} and betas {(beta1, beta2)}; give trust_radius a finite value"
        )


def _check_numbers(settings: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay", "trust_radius"):
        value = settings[name]
        if not isinstance(value, Real) and not (name == "lr" and isinstance(value, Tensor)):
            raise TypeError(f"rule: {name} is a number; found {value!r}; pass a float")
    betas = settings["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(isinstance(beta, Real) for beta in betas):
        raise TypeError(f"rule: betas is a pair of numbers; found {betas!r}; pass (β₁, β₂), such as (0.9, 0.999)")


def _check(name: str, value: Any, rule: str, holds: Any) -> None:
    if not bool(holds):
        raise ValueError(f"rule: {rule}; found {name} = {value}; choose a value within the rule")


def check_parameter(p: Tensor) -> None:
    """Raise ValueError for a parameter that the optimizer cannot drive."""
    if p.is_complex():
        raise ValueError(
            f"rule: parameters are real; found {p.dtype} of shape {tuple(p.shape)}; pass torch.view_as_real of it"
        )
    check_live(p)
    if p.device.type == "mps" and (is_frame(p) or is_other_point(p)):
        raise ValueError(
            f"rule: frames and points keep scalars in float64, which MPS has not; found a parameter of shape "
            f"{tuple(p.shape)} on {p.device}; train on CPU or CUDA, or unpatch the model and use torch.optim.AdamW"
        )
    if is_frame(p) or any(".frames" in name for name in getattr(p, "_fqns", ())):
        check_whole_frames(p)
    if is_frame(p) and not p.is_meta and local(p).numel():
        check_on_manifold(p)


def check_on_manifold(p: Tensor) -> None:
    """Raise ValueError when a frame's columns are not orthonormal to the precision of its type."""
    worst = float(defect(local(p)).max()) / math.sqrt(p.shape[-1])
    tolerance = DEFECT_TOLERANCE[p.dtype]
    if not worst <= tolerance:
        raise ValueError(
            f"rule: a frame of {p.dtype} has ‖WᵀW − I‖_F/√r ≤ {tolerance}; found {worst:.2g} in a parameter of "
            f"shape {tuple(p.shape)}; project it first: p.data.copy_(p.manifold.projx(p.data))"
        )


def check_lr_scales(groups: list[dict[str, Any]]) -> None:
    """Raise RuntimeError where groups have several `lr_scale` and yet one lr: nothing has applied the scales."""
    scaled = [group for group in groups if "lr_scale" in group]
    scales, lrs = ({float(group[key]) for group in scaled} for key in ("lr_scale", "lr"))
    if len(scales) > 1 and len(lrs) == 1 and lrs != {0.0}:
        raise RuntimeError(
            f"rule: a scheduler or the loop multiplies lr by each group's lr_scale; found lr = {lrs.pop()} in all "
            f"groups with {len(scales)} different lr_scale; build one of timm's schedulers, or call "
            "stiefel_geo.scale_lr_(optimizer) once, before the first step"
        )


def check_frames_kept(given: int, found: int) -> None:
    """Raise RuntimeError where a wrapper put other tensors into the groups, which AdamW would move without a word."""
    if given and not found:
        raise RuntimeError(
            f"rule: frames stay the whole ManifoldParameters that the optimizer was given; found none of its {given} "
            "frames in its groups, as after DeepSpeed's ZeRO or bf16 engine flattened them; use DDP, fully_shard, "
            "torch's ZeroRedundancyOptimizer, or DeepSpeed's stage 0 in float32"
        )


def check_live(p: Tensor) -> None:
    """Raise ValueError for a parameter that patch() or unpatch() took out of its model."""
    retired = getattr(p, "_stiefel_geo_retired", None)
    if retired:
        raise ValueError(f"rule: the optimizer drives parameters of the model as it is; found {retired}")


def check_gradient(p: Tensor) -> None:
    """Raise RuntimeError for a gradient that the step cannot take."""
    if p.grad is not None and p.grad.is_sparse:
        raise RuntimeError(
            f"rule: gradients are dense; found a sparse gradient of shape {tuple(p.shape)}; "
            "build the embedding with sparse=False, or give it an optimizer of its own"
        )


def check_state(p: Tensor, state: dict[str, Any]) -> None:
    """Raise RuntimeError when the model was moved or cast and the optimizer's state was not."""
    exp_avg = state["exp_avg"]
    if exp_avg.device != p.device:
        raise RuntimeError(
            f"rule: state lies on the device of its parameter, {p.device}; found {exp_avg.device}: the model was moved "
            "after the optimizer's first step; move it first, or reload with optimizer.load_state_dict("
            "optimizer.state_dict())"
        )
    with_master = is_frame(p) and is_half(p)
    wanted = torch.float32 if with_master else p.dtype
    if exp_avg.dtype != wanted or ("master" in state) != with_master:
        raise RuntimeError(
            f"rule: state has the precision of its parameter, {p.dtype}; found state made for another one "
            f"({exp_avg.dtype}): the model was cast after the optimizer's first step; cast it first, and build the "
            "optimizer after it"
        )


def check_plain(p: Tensor, state: dict[str, Any], group: dict[str, Any], compiling: bool) -> None:
    """Raise RuntimeError for what torch's AdamW refuses of a plain parameter, but only once the frames have moved.

    Compiled it refuses neither, and nor does this.
    """
    if compiling or is_frame(p) or is_other_point(p):
        return
    if group["capturable"]:
        capturable = _get_capturable_supported_devices(supports_xla=not group["foreach"])
        _check_counter("capturable", p, state["step"], capturable)
    if group["fused"]:
        _check_counter("fused", p, state["step"], _get_fused_kernels_supported_devices())
    if group["foreach"] and not group["capturable"] and isinstance(group["lr"], Tensor):
        raise RuntimeError(
            "rule: for plain parameters foreach=True takes a tensor lr only with capturable=True; found "
            "capturable=False; leave foreach out, or pass a float lr"
        )


def _check_counter(option: str, p: Tensor, step: Tensor, devices: list[str]) -> None:
    if p.device.type not in devices or step.device.type != p.device.type:
        raise RuntimeError(
            f"rule: {option}=True takes plain parameters, and their step counters, on one of {devices}; found a "
            f"parameter on {p.device} and its counter on {step.device}; build the optimizer without {option}, or "
            "move the model first"
        )


def check_loaded(p: Tensor, found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    """Raise ValueError for a loaded state of `p` that has not the entries and shapes of the optimizer's own."""
    shapes = {key: tuple(torch.as_tensor(value).shape) for key, value in found.items()}
    own = {key: tuple(value.shape) for key, value in wanted.items()}
    if shapes != own:
        raise ValueError(
            f"rule: the state of a {p.dtype} parameter of shape {tuple(p.shape)} has entries {own}; found {shapes}; "
            "load a file that this optimizer saved for the same model (patched alike and in the same precision), or "
            "start without one"
        )


def check_compilable(group: dict[str, Any]) -> None:
    """Raise RuntimeError for what torch.compile would turn into another step without a word, or into an inner error."""
    if torch.__version__ < COMPILING_FROM:
        raise RuntimeError(
            f"rule: torch.compile follows the step from torch {COMPILING_FROM} on; found torch {torch.__version__}; "
            "leave the optimizer out of torch.compile (the model may stay in it), or take a newer torch"
        )
    if not is_full() and any(is_frame(p) for p in group["params"]):
        raise RuntimeError(
            "rule: a compiled step bakes in the global matmul precision and needs it in full; found "
            f"{describe()}; call torch.set_float32_matmul_precision('highest'), or leave the optimizer out of "
            "torch.compile"
        )
    manifolds = {type(p.manifold).__name__ for p in group["params"] if is_other_point(p)}
    if manifolds:
        raise RuntimeError(
            f"rule: a compiled step drives frames and Euclidean parameters; found points on {sorted(manifolds)}, whose "
            "geoopt operations torch.compile does not see; give them an optimizer that is not compiled"
        )
