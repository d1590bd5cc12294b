"""Proposition 5: weight decay has zero Riemannian gradient.

Statement. P_W(λW) = 0 for every λ, and shrinking a frame does nothing that the retraction does not undo. So weight
decay, coupled or decoupled, never touches a frame, whereas it drives the singular values of AdamW's query and key
projections towards zero.

Proof. WᵀW = I, so P_W(W) = W − W·sym(I) = 0: ½λ‖W‖² is constant on the manifold. polar(cW) = cW(c²I)^{−1/2} = W
for c > 0.

Checked here. Both identities; a step whose whole gradient is a decay; trajectories with weight decay 0 and 10;
an attention layer trained with strong decay, its heads the same frames at the start under both optimizers.
"""

import copy

import torch
from torch import Tensor

from ..attention.patching import patch
from ..manifold import PolarStiefel
from ..stiefel import random_frame
from .attention import Layer, attention, backward, data, heads
from .certificate import Case, Certificate
from .observing import OptimizerFactory, Regression, distance, one_step, parameter, tangent_part, trajectory

LR, DECAY = 1e-3, 100.0  # a plain weight shrinks by a tenth in every step
TRAINING_STEPS = 30


def check(case: Case, make: OptimizerFactory) -> list[Certificate]:
    """Six certificates."""
    generator = case.generator(5)
    W, _ = case.frame_and_gradient(generator)
    problem = Regression.draw(case, generator)
    without, with_decay = (trajectory(make, parameter(W), problem, weight_decay=decay) for decay in (0.0, 10.0))
    zero = torch.linalg.matrix_norm(tangent_part(make, W, W)) / W.numel() ** 0.5
    shrunk = torch.linalg.matrix_norm(PolarStiefel().projx((1 - 1e-3 * 10) * W) - W) / case.r**0.5
    moved = (one_step(make, W, 10 * W)[0] - W).abs().max()
    frames, plain = _trained(case, make, generator)
    return [
        case.at_most(5, "‖P_W(W)‖_F/√(dr)", zero, 1e-15),
        case.at_most(5, "‖polar((1−ηλ)W) − W‖_F/√r", shrunk, 1e-14),
        case.at_most(5, "a step on the gradient λW: largest change of an entry", moved, 0.0),
        case.at_most(5, "100 steps with weight decay 0 and 10: frames apart", distance(without, with_decay), 0.0),
        case.at_most(
            5,
            "attention trained with strong decay: singular values of the frames off 1 by",
            (frames - 1).abs().max(),
            1e-13,
        ),
        case.at_most(5, "beside it, mean singular value of AdamW's W_Q, W_K, from 1 down to", plain.mean(), 0.1),
    ]


def _trained(case: Case, make: OptimizerFactory, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Singular values of all queries and keys after training: on frames with `make`, and plain with AdamW."""
    layer, teacher = attention(case, generator, qkv_bias=True), attention(case, generator, qkv_bias=True)
    with torch.no_grad():
        for role in heads(layer, layer.qkv.weight):
            role.copy_(random_frame(*role.shape, dtype=role.dtype, generator=generator))
        examples = [(x, teacher(x)) for x, _ in (data(case, generator) for _ in range(TRAINING_STEPS))]
    on_frames = copy.deepcopy(layer)
    patch(on_frames, core="identity")
    _train(on_frames, make(on_frames.parameters(), lr=LR, weight_decay=DECAY), examples)
    _train(layer, torch.optim.AdamW(layer.parameters(), lr=LR, weight_decay=DECAY), examples)
    return _singular_values(on_frames), _singular_values(layer)


def _train(layer: Layer, optimizer: torch.optim.Optimizer, examples: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in examples:
        backward(layer, x, y)
        optimizer.step()


def _singular_values(layer: Layer) -> Tensor:
    return torch.cat([torch.linalg.svdvals(role) for role in heads(layer, layer.qkv.weight.detach())])
