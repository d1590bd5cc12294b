"""The pieces of a step by themselves: where each threshold lies, and which of two equal ways is taken."""

import math
from typing import Any

import geoopt
import pytest
import torch
from support.cases import frame, gradients

from stiefel_geo import ScaleFreeRiemannianAdam
from stiefel_geo.optim import bounds, norms, step
from stiefel_geo.optim.norms import Lengths
from stiefel_geo.optim.step import Batch, Scalars, Settings

EPS = torch.finfo(torch.float64).eps
USUAL = Settings(lr=0.1, beta1=0.9, beta2=0.999, trust_radius=1.0)
MOVES = torch.tensor([True])


def scalars(n: int, v: float = 0.0, t: float = 0.0) -> Scalars:
    return Scalars(*(torch.full((n,), value, dtype=torch.float64) for value in (v, t, 0, 0)))


def circle() -> geoopt.ManifoldParameter:
    """The frame (1, 0)ᵀ of St(2, 1), where products are exact."""
    p = frame(2, 1)
    p.data.copy_(torch.tensor([[1.0], [0.0]]))
    return p


def move(p: torch.Tensor, G: list[float], **settings) -> ScaleFreeRiemannianAdam:
    optimizer = ScaleFreeRiemannianAdam([p], **settings)
    p.grad = torch.tensor(G, dtype=torch.float64)[:, None]
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("tangent", "moves"), [(15.5, False), (16, False), (16.5, True)])
@pytest.mark.parametrize("normal", [1.0, -8.0])
def test_a_tangent_part_of_up_to_16_eps_of_the_gradient_is_rounding_error(
    tangent: float, moves: bool, normal: float
) -> None:
    p = circle()
    optimizer = move(p, [normal, tangent * EPS * abs(normal)], lr=0.1, betas=(0.0, 0.9))
    assert (p[1].item() != 0) == moves
    assert (optimizer.state[p]["exp_avg_sq"].item() > 0) == moves


@pytest.mark.parametrize(("tangent", "moves"), [(16, False), (17, True)])
def test_momentum_of_up_to_16_eps_of_the_gradient_is_rounding_error(tangent: float, moves: bool) -> None:
    p = circle()
    optimizer = move(p, [0.0, 1.0], lr=0.0, betas=(0.0, 0.5))  # so that v is not 0
    optimizer.param_groups[0]["lr"] = 0.1
    p.grad = torch.tensor([[1.0], [tangent * EPS]], dtype=torch.float64)
    optimizer.step()
    assert (p[1].item() != 0) == moves


def lengths(*rows: list[float]) -> Lengths:
    """From those of the ambient or normal part, the transport, U and m."""
    measured = Lengths.empty(len(rows[0]), torch.device("cpu"))
    measured.rows.copy_(torch.tensor(rows, dtype=torch.float64))
    return measured


@pytest.mark.parametrize(("excess", "kept"), [(0.0, False), (15.5, False), (16, False), (16.5, True)])
@pytest.mark.parametrize("beta1", [0.5, 0.75])
def test_what_is_left_beside_the_transport_counts_from_16_eps_on(excess: float, kept: bool, beta1: float) -> None:
    tangent = 3.0 * math.sqrt(1 + excess * 2.0**-40)
    measured = lengths([3.0], [3.0 * (1 - beta1) / beta1], [tangent], [5.0])
    g_sq, m_sq, _ = norms.squares(measured, beta1, 2.0**-40)
    assert (g_sq.item() > 0) == kept
    assert g_sq.item() == pytest.approx(excess * 2.0**-40 * 9 if kept else 0.0, rel=1e-3)
    assert m_sq.item() == 25


def test_gradient_is_the_tangent_and_the_normal_part_together() -> None:
    measured = lengths([3.0], [0.0], [4.0], [1.0])
    measured.find_ambient_()
    g_sq, m_sq, floor = norms.squares(measured, 0.9, EPS)
    assert [g_sq.item(), m_sq.item(), floor.item()] == [16, 1, 25 * (16 * EPS) ** 2]


@pytest.mark.parametrize("broken", ["normal", "tangent"])
@pytest.mark.parametrize("size", [math.nan, math.inf, 1e160])
def test_gradient_is_finite_while_its_square_is_and_counts_as_zero_else(broken: str, size: float) -> None:
    rows = [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [1.0, 1.0]]
    rows[{"normal": 0, "tangent": 2}[broken]][1] = size
    measured = lengths(*rows)
    measured.find_ambient_()
    assert measured.finite.tolist() == [True, False]
    assert norms.squares(measured, 0.5, EPS).g.tolist() == [0.75, 0]


def test_lengths_of_batches_are_views_and_those_of_one_are_all() -> None:
    whole = lengths([1.0, 2.0, 3.0], *[[0.0] * 3] * 3)
    assert whole.split([3]) == [whole]
    first, second = whole.split([1, 2])
    second.momentum.fill_(7.0)
    second.finite.fill_(True)
    assert (first.ambient.tolist(), second.ambient.tolist()) == ([1], [2, 3])
    assert whole.momentum.tolist() == [0, 7, 7]
    assert whole.finite[1:].all()


def frobenius(*stacks: torch.Tensor) -> tuple[torch.Tensor, bool]:
    sizes = [torch.empty(X.shape[:-2], dtype=torch.float64) for X in stacks]
    ordinary = norms.frobenius_(sizes, stacks)
    return torch.cat([each.flatten() for each in sizes]), ordinary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("size", "ordinary"), [(0.0, False), (0.9e-16, False), (1.1e-16, True), (1, True), (0.9e16, True), (1.1e16, False)]
)
def test_norms_between_1e_16_and_1e16_are_ordinary(size: float, ordinary: bool, dtype: torch.dtype) -> None:
    X = torch.zeros(2, 3, 4, 2, dtype=dtype)
    X[..., 0, 0] = 1.0
    Y = X[0, :1].clone()
    Y[0, 0, 0] = size
    for stacks in [(X, Y), (Y, X), (Y,)]:
        sizes, known = frobenius(*stacks)
        assert known == ordinary
        assert sizes == pytest.approx([v for Z in stacks for v in Z[..., 0, 0].double().flatten().tolist()], rel=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_norms_that_are_not_finite_are_not_ordinary(broken: float) -> None:
    X = torch.ones(3, 4, 2)
    X[1, 2, 1] = broken
    sizes, ordinary = frobenius(X)
    assert not ordinary
    assert torch.isfinite(sizes).tolist() == [True, False, True]
    assert sizes[0].item() == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -125, -80, 0, 80, 120])
def test_scaled_norms_are_exact_at_every_size_of_float32(exponent: int) -> None:
    X = torch.tensor([[[3.0, 0.0], [0.0, -4.0]], [[0.0, 0.0], [0.0, 0.0]]]) * torch.tensor(2.0) ** exponent
    assert norms._scaled(X).tolist() == [5 * 2.0**exponent, 0]


def test_reads_are_free_on_a_cpu_outside_of_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bounds.reads_are_free(torch.zeros(1))
    assert not bounds.reads_are_free(torch.zeros(1, device="meta"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not bounds.reads_are_free(torch.zeros(1))
    assert not frobenius(torch.ones(1, 2, 2))[1]
    assert norms.measured_type(torch.ones(1)) == torch.float64


def test_norms_without_reads_are_float64_and_of_unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "reads_are_free", lambda X: False)
    sizes, ordinary = frobenius(torch.full((1, 2, 2), 1e-30), torch.ones(2, 3, 3))
    assert sizes.tolist() == pytest.approx([2e-30, 3, 3])
    assert not ordinary


@pytest.mark.parametrize(
    ("length", "bound"),
    [(0, 2**-7), (2**-8, 2**-7), (2**-7, 2**-7), (0.0079, 2**-6), (0.25, 0.25), (0.26, 0.5), (3, 4)],
)
def test_bound_is_the_longest_step_rounded_up_to_a_power_of_two(length: float, bound: float) -> None:
    a, m = torch.tensor([0.5, 2.0], dtype=torch.float64), torch.tensor([length, length / 2], dtype=torch.float64)
    assert step.longest_step(a, m, 12, USUAL) == bound


def test_bound_of_the_host_is_the_longest_step_that_lr_allows_within_the_trust_radius() -> None:
    none = (0.0, 0.0)  # without memory a step has the length lr·√(d·r)
    assert bounds.step_bound(0.1, none, math.inf, 16) == pytest.approx(0.4)
    assert bounds.step_bound(0.1, none, 0.3, 16) == 0.3
    assert bounds.step_bound(0.1, none, 0.5, 16) == pytest.approx(0.4)
    assert bounds.step_bound(0.1, (0.9, 0.999), math.inf, 16) == pytest.approx(0.4 * bounds.largest_ratio(0.9, 0.999))
    assert bounds.step_bound(0.1, (0.9, 0.5), 2.0, 16) == 2.0  # no lr bounds old momentum
    assert bounds.step_bound(0.0, (0.9, 0.5), 2.0, 16) == 0.0


def test_bound_of_the_host_is_the_trust_radius_where_lr_is_unknown_or_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert bounds.step_bound(None, (0.9, 0.999), 1.0, 16) == 1.0
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert bounds.step_bound(1e-6, (0.9, 0.999), 1.0, 16) == 1.0
    assert bounds.step_bound(0.1, (0.0, 0.0), math.inf, 16) == pytest.approx(0.4)


def test_a_device_takes_the_bound_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "reads_are_free", lambda X: False)
    one = torch.ones(1, dtype=torch.float64)
    settings = USUAL._replace(beta1=0.0, beta2=0.0)
    assert step.longest_step(one, one, 4, settings._replace(largest_lr=0.1)) == 0.25
    assert step.longest_step(one, one, 4, settings._replace(largest_lr=None)) == 1.0


def test_only_steps_longer_than_the_trust_radius_are_shortened_and_counted() -> None:
    kept = scalars(4)
    a, m = torch.tensor([2.0, 2.0, 2.0, 0.0]), torch.tensor([0.125, 0.25, 0.5, 0.0])
    assert step.cap_(kept, a, m, torch.tensor([True, True, True, False]), 0.5).tolist() == [2, 2, 1, 0]
    assert kept.capped.tolist() == [0, 0, 1, 0]
    assert kept.skipped.tolist() == [0, 0, 0, 1]


def test_step_scale_is_the_formula() -> None:
    kept = scalars(1, v=0.004, t=3)
    expected = 0.1 / ((1 - 0.9**3) * math.sqrt(0.004 / -math.expm1(3 * math.log(0.999))))
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        assert step.step_scale(kept, USUAL._replace(lr=lr), MOVES).item() == pytest.approx(expected, rel=1e-14)
        assert step.step_scale(kept, USUAL._replace(lr=lr), ~MOVES).item() == 0


@pytest.mark.parametrize(("v", "t", "lr"), [(0.0, 3, 0.1), (0.0, 0, 0.1), (0.004, 3, 0.0), (0.0, 0, 0.0)])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
def test_step_scale_is_zero_without_gradients_and_without_lr(
    v: float, t: float, lr: float, betas: tuple[Any, ...]
) -> None:
    settings = USUAL._replace(lr=lr, beta1=betas[0], beta2=betas[1])
    for moves in (MOVES, ~MOVES):
        assert step.step_scale(scalars(1, v=v, t=t), settings, moves).item() == 0


def test_a_length_that_is_not_finite_shortens_nothing() -> None:
    kept = scalars(1)
    assert step.cap_(kept, torch.zeros(1), torch.tensor([math.nan]), MOVES, 0.5).tolist() == [0]
    assert kept.capped.tolist() == [0]
    assert step.longest_step(torch.zeros(1), torch.tensor([math.nan]), 12, USUAL) == 2**-7


def test_second_moment_and_step_follow_finite_gradients_alone() -> None:
    kept = scalars(2, v=1.0, t=4)
    finite = torch.tensor([True, False])
    step.advance_second_moment_(kept, torch.tensor([36.0, 0.0], dtype=torch.float64), 12, finite, 0.999)
    assert kept.exp_avg_sq.tolist() == pytest.approx([1.002, 1], rel=1e-14)
    assert kept.step.tolist() == [5, 4]


def batch(*sizes: int, dtype: torch.dtype = torch.float32) -> Batch:
    made = Batch([], [], [], [])
    for seed, n in enumerate(sizes):
        W = frame(n, 8, 2, seed=seed, dtype=dtype).detach()
        made.add(W, gradients((n, 8, 2), 1, dtype)[0], torch.zeros_like(W))
    return made


def test_parts_of_a_stack_are_views_and_a_single_one_is_the_stack() -> None:
    stack = torch.arange(6.0)
    (whole,) = batch(6).split(stack)
    assert whole is stack
    parts = batch(2, 1, 3).split(stack)
    assert [part.tolist() for part in parts] == [[0, 1], [2], [3, 4, 5]]
    assert parts[1].data_ptr() == stack[2:].data_ptr()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every call of `retract_` was given."""
    seen: list[dict[str, Any]] = []
    usual = step.retract_

    def watched(batch: Batch, Y: torch.Tensor, bound: float, rest: torch.Tensor | None) -> None:
        seen.append({"dtype": Y.dtype, "bound": bound, "all_move": rest is None, "n": len(Y), "at": Y.data_ptr()})
        usual(batch, Y, bound, rest)

    monkeypatch.setattr(step, "retract_", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_move_in_their_own_precision_and_in_one_workspace(
    moves: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    step.step_([batch(1, dtype=dtype), batch(2, 1, dtype=dtype), batch(2, dtype=dtype)], scalars(6), USUAL)
    assert [call["n"] for call in moves] == [1, 3, 2]
    assert {call["dtype"] for call in moves} == {dtype}
    assert len({call["at"] for call in moves}) == 1
    assert all(call["all_move"] for call in moves)


def test_frames_at_rest_are_looked_for_only_where_there_may_be_one(
    moves: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    resting = batch(2)
    resting.G[0][1] = 0
    step.step_([resting], scalars(2), USUAL)
    monkeypatch.setattr(step, "reads_are_free", lambda X: False)
    step.step_([batch(2)], scalars(2), USUAL)
    assert [call["all_move"] for call in moves] == [False, False]


def test_settings_descend_unless_told_to_climb() -> None:
    down, up = batch(1), batch(1)
    step.step_([down], scalars(1), USUAL)
    step.step_([up], scalars(1), USUAL._replace(maximize=True))
    before, G = batch(1).W[0], batch(1).G[0]
    assert ((down.W[0] - before) * G).sum() < 0 < ((up.W[0] - before) * G).sum()


def test_a_batch_whose_lists_do_not_fit_is_refused() -> None:
    lame = batch(1, 1)
    lame.G.pop()
    with pytest.raises(RuntimeError, match="same number of tensors"):
        step.step_([lame], scalars(2), USUAL)
    short = batch(1, 1)
    with pytest.raises(ValueError, match="zip"):
        step.retract_(short._replace(W=short.W[:1]), torch.cat(short.W), 1.0, None)


def test_a_batch_of_copies_leaves_the_new_frames_in_its_gradients() -> None:
    usual, copied = batch(3), batch(3)._replace(copies=True)
    for each in (usual, copied):
        step.step_([each], scalars(3), USUAL)
    assert torch.equal(copied.G[0], usual.W[0])
    assert torch.equal(copied.m[0], usual.m[0])


def test_gradients_are_only_read() -> None:
    given = batch(2, 1)
    before = [G.clone() for G in given.G]
    step.step_([given], scalars(3), USUAL)
    assert all(torch.equal(G, old) for G, old in zip(given.G, before, strict=True))
