"""torch.compile(optimizer.step) does what the eager step does, state entries included, or refuses."""

import geoopt
import pytest
import torch
from support.frame_parameters import (
    assert_close,
    assert_same,
    drive,
    entries,
    frame,
    give_gradients,
    mixed,
    optimizer_of,
    values,
    worst_defect,
)
from support.matmul_settings import SETTINGS, usual_settings
from torch import nn

from stiefel_geo.optim import checks
from stiefel_geo.optim.checks import COMPILING_FROM

compiles = pytest.mark.skipif(torch.__version__ < COMPILING_FROM, reason="this torch does not compile the step")
BACKENDS = ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
OPTIONS = [
    {},
    {"foreach": False, "betas": (0.5, 0.9)},
    {"maximize": True, "weight_decay": 0.3},
    {"trust_radius": 1e-3},
    {"lr": torch.tensor(1e-2)},
]
LABELS = ["defaults", "loop", "maximize", "capped", "tensor lr"]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def few(dtype):
    """A batch of frames, one alone, and a vector: what compiles in a second."""
    return [frame(3, 12, 4, dtype=dtype), frame(8, 1, dtype=dtype), mixed(dtype)[-1]]


def both(backend, options, dtype=torch.float32, steps=8, fullgraph=True, make=few):
    """Parameters and optimizers of an eager and a compiled run, after the same steps."""
    eager, compiled = make(dtype), make(dtype)
    one, other = optimizer_of(eager, **options), optimizer_of(compiled, **options)
    drive(one, eager, range(steps))
    drive(other, compiled, range(steps), torch.compile(other.step, backend=backend, fullgraph=fullgraph))
    return eager, compiled, one, other


@compiles
@pytest.mark.parametrize("options", OPTIONS, ids=LABELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_parameters_and_state_equal_the_eager_ones_at_step_eight(backend, options):
    eager, compiled, one, other = both(backend, options)
    assert_close(values(compiled), values(eager), 1e-5)
    ours, theirs = entries(one), entries(other)
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    for (_, key, a), (_, _, b) in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype, key
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=key)


@compiles
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_equals_eager_in_every_precision(backend, dtype):
    eager, compiled, *_ = both(backend, {}, dtype, make=lambda dtype: few(dtype)[:1])
    assert_close(
        values(compiled), values(eager), {torch.float64: 1e-13, torch.bfloat16: 2**-8}[dtype]
    )  # one unit in the last place


@compiles
def test_graph_breaks_allowed_change_nothing():
    eager, compiled, *_ = both("eager", {}, fullgraph=False)
    assert_close(values(compiled), values(eager), 1e-5)


@compiles
def test_compiled_path_stays_on_the_manifold_for_300_steps():
    params = [frame(3, 12, 4, dtype=torch.float32)]
    optimizer = optimizer_of(params, lr=0.1)
    drive(optimizer, params, range(300), torch.compile(optimizer.step, backend="eager", fullgraph=True))
    assert worst_defect(params) < 1e-5


@compiles
def test_compiled_step_skips_a_bad_frame_and_steps_the_others():
    p, q = frame(3, 12, 4, dtype=torch.float32), frame(3, 12, 4, dtype=torch.float32)
    one, other = optimizer_of([p]), optimizer_of([q])
    step = torch.compile(other.step, backend="aot_eager", fullgraph=True)
    for t in range(5):
        for each in (p, q):
            give_gradients([each], t)
            each.grad[t % 3, 0, 0] = float("nan")
        one.step()
        step()
    assert_close(values([q]), values([p]), 1e-6)
    assert_same([other.state[q]["skipped"]], [one.state[p]["skipped"]])
    assert other.state[q]["skipped"].sum() == 5


@compiles
def test_compiled_step_follows_an_lr_that_a_scheduler_changes():
    p, q = frame(3, 12, 4), frame(3, 12, 4)
    one, other = optimizer_of([p]), optimizer_of([q])
    step = torch.compile(other.step, backend="eager", fullgraph=True)
    for t in range(5):
        give_gradients([p], t)
        give_gradients([q], t)
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = 10.0 ** -(1 + t % 3)
        one.step()
        step()
    assert_close(values([q]), values([p]), 1e-13)


@compiles
def test_compiled_run_goes_on_from_an_eager_one():
    params, usual = few(torch.float64), few(torch.float64)
    optimizer, other = optimizer_of(params), optimizer_of(usual)
    drive(optimizer, params, range(4))
    drive(optimizer, params, range(4, 8), torch.compile(optimizer.step, backend="eager"))
    # compiled, torch's AdamW corrects its bias in float32
    assert_close(values(params), drive(other, usual, range(8)), 1e-6)
    assert_close(values(params[:2]), values(usual[:2]), 1e-13)


@compiles
def test_compiled_training_step_of_model_and_loss_equals_eager():
    paths = []
    for compiled in (False, True):
        p = frame(3, 12, 4)
        optimizer, target = optimizer_of([p]), frame(3, 12, 4, seed=5).detach()

        def train(p=p, optimizer=optimizer, target=target):
            (p - target).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(train, backend="eager") if compiled else train
        for _ in range(6):
            run()
        paths.append(values([p]))
    eager, compiled_ = paths
    assert_close(eager, compiled_, 1e-13)


@compiles
@pytest.mark.parametrize("options", [{"capturable": True}, {"foreach": True, "lr": torch.tensor(1e-2)}], ids=str)
def test_compiled_step_takes_options_that_the_eager_one_refuses_of_plain_parameters(options):
    lr = {"lr": options["lr"]} if "lr" in options else {}
    eager, compiled = few(torch.float64), few(torch.float64)
    usual, optimizer = optimizer_of(eager, **lr), optimizer_of(compiled, **options)
    drive(usual, eager, range(4))
    drive(optimizer, compiled, range(4), torch.compile(optimizer.step, backend="eager", fullgraph=True))
    assert_close(values(compiled), values(eager), 1e-6)


@compiles
@pytest.mark.parametrize("name", SETTINGS)
def test_compiling_frames_under_reduced_matmul_precision_is_refused(name):
    params = [frame(3, 12, 4, dtype=torch.float32)]
    optimizer = optimizer_of(params)
    SETTINGS[name]()
    try:
        with pytest.raises(RuntimeError, match=r"rule: .*set_float32_matmul_precision\('highest'\)"):
            drive(optimizer, params, range(1), torch.compile(optimizer.step, backend="eager"))
    finally:
        usual_settings()
    assert_same(values(params), [frame(3, 12, 4, dtype=torch.float32).detach()])


@compiles
def test_compiling_points_of_other_manifolds_is_refused():
    sphere = geoopt.Sphere()
    p = geoopt.ManifoldParameter(nn.functional.normalize(torch.ones(3, 4), dim=-1), manifold=sphere)
    optimizer = optimizer_of([p])
    with pytest.raises(RuntimeError, match="points on \\['Sphere'\\]"):
        drive(optimizer, [p], range(1), torch.compile(optimizer.step, backend="eager"))


def test_compiling_the_step_under_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "COMPILING_FROM", "99")
    params = [frame(3, 12, 4, dtype=torch.float32)]
    optimizer = optimizer_of(params)
    with pytest.raises(RuntimeError, match=r"rule: torch.compile follows the step from torch 99 on; found torch 2"):
        drive(optimizer, params, range(1), torch.compile(optimizer.step, backend="eager"))
