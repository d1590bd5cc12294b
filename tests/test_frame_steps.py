"""examples/frame_steps.py: the arms differ from the package's step in the one thing that their names say."""

import copy
import math

import geoopt
import pytest
import torch
from support.evidence_scripts import frame_steps

import stiefel_geo
from stiefel_geo import stiefel

SHAPE = (3, 12, 4)


def start(seed=0):
    generator = torch.Generator().manual_seed(seed)
    frame = stiefel.random_frame(*SHAPE, dtype=torch.float64, generator=generator)
    return geoopt.ManifoldParameter(frame, manifold=stiefel_geo.PolarStiefel())


def gradients(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(steps)]


def path(build, grads, lr=0.02, W=None):
    """The frame after all gradients."""
    W = start() if W is None else W
    optimizer = build([W], lr)
    for G in grads:
        W.grad = G.clone()
        optimizer.step()
    return W.detach()


def rotation(n, seed):
    return stiefel.random_frame(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_uncapped_differs_where_steps_are_longer_than_the_radius_and_nowhere_else():
    grads, arms = gradients(3), frame_steps.ON_MANIFOLD
    assert torch.equal(path(arms["scale_free"], grads), path(arms["scale_free_uncapped"], grads))
    assert not torch.allclose(path(arms["scale_free"], grads, 0.5), path(arms["scale_free_uncapped"], grads, 0.5))


def test_fixed_step_is_as_long_as_the_gradient_and_scale_free_is_not():
    moved = {}
    for arm in ("riemannian_sgd", "scale_free"):
        build = frame_steps.ON_MANIFOLD[arm]
        moved[arm] = [(path(build, [c * gradients(1)[0]], 1e-4) - start().detach()).norm() for c in (1.0, 10.0)]
    assert math.isclose(moved["riemannian_sgd"][1] / moved["riemannian_sgd"][0], 10.0, rel_tol=1e-3)
    assert math.isclose(moved["scale_free"][1] / moved["scale_free"][0], 1.0, rel_tol=1e-9)


def test_muon_moves_every_head_as_if_it_were_alone():
    grads = [G.float() for G in gradients(3)]
    together = torch.nn.Parameter(start().detach().float())
    moved = path(lambda frames, lr: frame_steps.optimizers("muon", frames, [], lr, 0.1)[1], grads, W=together)
    alone = torch.nn.Parameter(start().detach().float()[1])
    optimizer = torch.optim.Muon([alone], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for G in grads:
        alone.grad = G[1].clone()
        optimizer.step()
    assert torch.equal(moved[1], alone.detach())


def test_an_arm_in_another_layout_goes_on_from_its_saved_state():
    def muon(frames, lr):
        return frame_steps.optimizers("muon", frames, [], lr, 0.1)[1]

    first, second = torch.nn.Parameter(start().detach().float()), torch.nn.Parameter(start(seed=1).detach().float())
    one, other = muon([first], 0.02), muon([second], 0.02)
    grads = [G.float() for G in gradients(4)]
    for t, G in enumerate(grads):
        if t == 2:  # as an experiment resumes: weights and state come after the optimizer
            second.data.copy_(first.data)
            other.load_state_dict(copy.deepcopy(one.state_dict()))
        for W, optimizer in ((first, one), (second, other)):
            W.grad = G.clone()
            optimizer.step()
    assert torch.equal(first, second)


def test_pogo_moves_frames_down_the_gradient_and_keeps_them_orthonormal():
    pytest.importorskip("pogo")
    G = gradients(1)[0].float()
    W = geoopt.ManifoldParameter(start().detach().float(), manifold=stiefel_geo.PolarStiefel())
    before = W.detach().clone()
    after = path(frame_steps.ON_MANIFOLD["pogo"], [G], W=W)
    assert float((G * (after - before)).sum()) < -1e-3
    assert float(stiefel.defect(after).max()) < 1e-5


@pytest.mark.parametrize("arm", [arm for arm in frame_steps.INSTALLED if arm != "frozen"])
def test_k_scales_the_learning_rate_of_the_frames_alone(arm):
    frame = torch.nn.Parameter(start().detach().float())
    rest = torch.nn.Parameter(torch.ones(2, 2))
    frames = frame_steps.as_arm(arm, [frame], 0)
    groups = [g for opt in frame_steps.optimizers(arm, frames, [rest], 0.1, 0.0, 3.0) for g in opt.param_groups]
    of_rest = [g["lr"] for g in groups if any(p is rest for p in g["params"])]
    of_frames = [g["lr"] for g in groups if g["params"] and not any(p is rest for p in g["params"])]
    assert of_rest == [0.1]
    assert of_frames == [pytest.approx(0.3)]


@pytest.mark.parametrize(("arm", "kept"), [("scale_free", True), ("scale_free_elementwise", False)])
def test_only_one_scalar_a_frame_turns_with_the_space(arm, kept):
    turn, grads = rotation(SHAPE[1], 5), gradients(6)
    build = frame_steps.ON_MANIFOLD[arm]
    turned = geoopt.ManifoldParameter(turn @ start().detach(), manifold=stiefel_geo.PolarStiefel())
    there = path(build, [turn @ G for G in grads], W=turned)
    assert torch.allclose(turn @ path(build, grads), there, atol=1e-9) == kept


def test_canonical_gradient_is_tangent_and_counts_rotations_twice():
    W, G = start().detach(), gradients(1)[0]
    step = frame_steps.CanonicalStep([start()], lr=1.0)
    g, embedded = step.project(W, G), stiefel.project(W, G)
    assert torch.allclose(stiefel.sym(W.mT @ g), torch.zeros(1, dtype=W.dtype), atol=1e-12)
    assert torch.allclose(W.mT @ g, 2 * (W.mT @ embedded), atol=1e-12)
    assert torch.allclose(g - W @ (W.mT @ g), embedded - W @ (W.mT @ embedded), atol=1e-12)


def test_geoopts_adam_steps_shorter_by_the_root_of_the_entries():
    G = gradients(1)
    ours, theirs = (
        path(frame_steps.ON_MANIFOLD[arm], G, 1e-4) - start().detach() for arm in ("scale_free", "geoopt_adam")
    )
    assert math.isclose(ours.norm() / theirs.norm(), math.sqrt(SHAPE[1] * SHAPE[2]), rel_tol=0.01)


@pytest.mark.parametrize("arm", frame_steps.INSTALLED)
def test_every_arm_trains_the_rest_and_moves_frames_unless_frozen(arm):
    frame = start().detach().float()
    frames = frame_steps.as_arm(arm, [torch.nn.Parameter(frame.clone())], seed=0)
    begin = frames[0].detach().clone()
    matrix, vector = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))
    for optimizer in frame_steps.optimizers(arm, frames, [matrix, vector], 0.1, 0.5):
        for p in (*frames, matrix, vector):
            p.grad = torch.arange(p.numel(), dtype=p.dtype).view_as(p)
        optimizer.step()
    assert torch.equal(begin, frames[0].detach()) == (arm == "frozen")
    assert torch.equal(begin, frame) == (arm != "adamw_default_init")
    assert float(matrix[0, 0].detach()) == pytest.approx(0.95)  # a zero gradient: what moves it is the decay
    assert float(vector[0].detach()) == 1.0
    on_manifold = bool((stiefel.defect(frames[0]) < 1e-5).all())
    assert on_manifold == (arm in frame_steps.ON_MANIFOLD)
