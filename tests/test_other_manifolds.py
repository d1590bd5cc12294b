"""Parameters on geoopt's other manifolds: they stay on them, descend, and keep the frames' laws per point."""

import math

import geoopt
import pytest
import torch
from support.frame_parameters import (
    assert_close,
    assert_same,
    drive,
    entries,
    frame,
    gaussian,
    give_gradients,
    optimizer_of,
    values,
)


def on(manifold, data):
    return geoopt.ManifoldParameter(data, manifold=manifold)


def sphere():
    return on(geoopt.Sphere(), torch.nn.functional.normalize(gaussian((4, 7), 0), dim=-1))


def ball():
    return on(geoopt.PoincareBall(), 0.2 * torch.nn.functional.normalize(gaussian((4, 7), 1), dim=-1))


def canonical():
    return on(geoopt.CanonicalStiefel(), frame(7, 3).detach().clone())


def euclidean():
    return on(geoopt.Euclidean(ndim=1), gaussian((4, 7), 2))


def lorentz():
    return on(geoopt.Lorentz(), geoopt.Lorentz().projx(gaussian((4, 7), 3)))


MAKERS = [sphere, ball, canonical, euclidean, lorentz]
BATCHED = [sphere, ball, euclidean, lorentz]


@pytest.mark.parametrize("make", [sphere, ball, canonical, euclidean])  # geoopt's check of Lorentz is float32 alone
def test_points_stay_on_their_manifold(make):
    p = make()
    drive(optimizer_of([p]), [p], range(200))
    assert p.manifold.check_point_on_manifold(p.detach(), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("make", MAKERS)
def test_descent_reaches_a_target_on_the_manifold(make):
    p, target = make(), make().detach()
    with torch.no_grad():
        start = p.manifold.retr(p, p.manifold.egrad2rgrad(p, 0.3 * gaussian(p.shape, 9)))
        p.copy_(start)
    optimizer = optimizer_of([p])
    before = float((p.detach() - target).norm())
    for t in range(300):
        optimizer.param_groups[0]["lr"] = 5e-2 * 0.98**t
        optimizer.zero_grad()
        (p - target).square().sum().backward()
        optimizer.step()
    assert float((p.detach() - target).norm()) < 0.1 * before


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("scale", [2.0**-90, 2.0**60])
def test_path_does_not_depend_on_the_scale_of_gradients(make, scale):
    p, q = make(), make()
    one, other = optimizer_of([p]), optimizer_of([q])
    for t in range(6):
        give_gradients([p], t)
        q.grad = p.grad * scale
        one.step()
        other.step()
    assert_close(values([p]), values([q]), 1e-12)


@pytest.mark.parametrize("make", BATCHED)
def test_points_of_one_parameter_step_as_parameters_of_their_own(make):
    batch = make()
    singles = [on(batch.manifold, x.clone()) for x in batch.detach()]
    one, other = optimizer_of([batch]), optimizer_of(singles)
    for t in range(6):
        give_gradients([batch], t)
        batch.grad[0] *= 100
        for p, G in zip(singles, batch.grad, strict=True):
            p.grad = G.clone()
        one.step()
        other.step()
    assert_close(list(batch.detach()), values(singles), 1e-12)


@pytest.mark.parametrize("make", BATCHED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_point_with_a_bad_gradient_rests_and_is_counted_while_others_step(make, bad):
    p, q = make(), make()
    one, other = optimizer_of([p]), optimizer_of([q])
    drive(one, [p], range(2))
    drive(other, [q], range(2))
    before = p.detach()[1].clone()
    give_gradients([p], 2)
    give_gradients([q], 2)
    p.grad[1, 2] = bad
    one.step()
    other.step()
    assert torch.equal(p[1], before)
    assert one.state[p]["skipped"].flatten().tolist() == [0, 1, 0, 0]
    assert_close([p.detach()[[0, 2, 3]]], [q.detach()[[0, 2, 3]]], 1e-13)


@pytest.mark.parametrize("make", BATCHED)
def test_scales_of_points_in_one_parameter_do_not_reach_each_other(make):
    source = make()
    p, q = (on(source.manifold, source.detach().float()) for _ in range(2))
    one, other = optimizer_of([p]), optimizer_of([q])
    scales = torch.tensor([1e-25, 1.0, 1e10, 1e25])[:, None]
    for t in range(6):
        give_gradients([q], t)
        p.grad = q.grad * scales
        one.step()
        other.step()
    assert_close(values([p]), values([q]), 1e-4)
    assert ((p.detach() - source.detach()).norm(dim=-1) > 1e-2).all()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("options", [{"lr": 0.0}, {}], ids=["lr 0", "gradient 0"])
def test_nothing_moves_without_lr_or_gradient(make, options):
    p = make()
    optimizer = optimizer_of([p], **options)
    for t in range(3):
        p.grad = gaussian(p.shape, t) * float("lr" in options)
        optimizer.step()
    assert torch.equal(p, make())


@pytest.mark.parametrize("make", [sphere, ball, canonical, euclidean])
def test_step_is_no_longer_than_the_trust_radius(make):
    p = make()
    optimizer = optimizer_of([p], lr=100.0, trust_radius=1e-3)
    before = p.detach().clone()
    give_gradients([p], 0)
    optimizer.step()
    assert optimizer.state[p]["capped"].min() == 1
    assert 0 < float((p.detach() - before).norm()) < 4 * 1.1e-3  # at the most four points, and a metric factor near 1


@pytest.mark.parametrize("make", MAKERS)
def test_maximize_is_descent_along_negated_gradients(make):
    p, q = make(), make()
    one, other = optimizer_of([p], maximize=True), optimizer_of([q])
    for t in range(5):
        give_gradients([p], t)
        q.grad = -p.grad
        one.step()
        other.step()
    assert_same(values([p]), values([q]))


@pytest.mark.parametrize("make", MAKERS)
def test_gradient_keeps_its_bits(make):
    p = make()
    optimizer = optimizer_of([p], weight_decay=0.5)
    give_gradients([p], 0)
    before = p.grad.clone()
    optimizer.step()
    assert torch.equal(p.grad, before)


@pytest.mark.parametrize("make", MAKERS)
def test_state_round_trip_goes_on_bit_for_bit(make):
    p, q = make(), make()
    one, other = optimizer_of([p]), optimizer_of([q])
    drive(one, [p], range(3))
    q.data.copy_(p.data)
    other.load_state_dict(one.state_dict())
    for state in other.state.values():
        state.update({key: value.clone() for key, value in state.items()})
    assert_same(drive(one, [p], range(3, 6)), drive(other, [q], range(3, 6)))
    assert [key for _, key, _ in entries(one)] == [key for _, key, _ in entries(other)]


@pytest.mark.parametrize("make", [sphere, ball, euclidean])
def test_float32_points_stay_on_their_manifold_for_1000_steps(make):
    source = make()
    p = on(source.manifold, source.detach().float())
    drive(optimizer_of([p]), [p], range(1000))
    assert p.manifold.check_point_on_manifold(p.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("betas", [(0.0, 0.9), (0.9, 0.99)])  # without momentum, and with its transport
def test_sphere_follows_the_frame_of_one_column(betas):
    p = sphere()
    q = geoopt.ManifoldParameter(p.detach().unsqueeze(-1).clone(), manifold=geoopt.EuclideanStiefel())
    one, other = optimizer_of([p], betas=betas), optimizer_of([q], betas=betas)
    for t in range(10):
        give_gradients([p], t)
        q.grad = p.grad.unsqueeze(-1).clone()
        one.step()
        other.step()
    assert_close(values([p]), [q.detach().squeeze(-1)], 1e-10)


def test_plain_euclidean_manifold_steps_with_one_scalar_per_point():
    p = euclidean()
    optimizer = optimizer_of([p])
    drive(optimizer, [p], range(2))
    assert optimizer.state[p]["exp_avg_sq"].shape == (4, 1)
