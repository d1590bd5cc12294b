"""The step of Euclidean parameters: torch's own functional AdamW."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from .families import lr_of


def step_(params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]], group: dict[str, Any]) -> None:
    """Step parameters that all have a gradient, with the options of their group, in place."""
    if not params:
        return
    exp_avgs, exp_avg_sqs, steps = ([state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq", "step"))
    beta1, beta2 = group["betas"]
    adamw(
        list(params),
        [p.grad for p in params if p.grad is not None],
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=group["foreach"],
        capturable=group["capturable"],
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr_of(group),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
