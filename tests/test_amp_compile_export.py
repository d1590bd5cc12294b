"""A patched model under autocast, in half precision, compiled, exported."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.frame_parameters import grad_of
from support.parts import qkv
from support.tiny_vit import batch, frame_values, gap, largest_defect, loss_of, tiny_vit, train
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam
from stiefel_geo.attention.parametrization import ONE_GRAPH_FROM
from stiefel_geo.stiefel import defect

HALF = [torch.bfloat16, torch.float16]
NO_ONNX = "ONNX export is tested where onnx, onnxscript and onnxruntime are installed: pip install stiefel-geo[export]"


def amp_steps(model: nn.Module, dtype: torch.dtype, steps: int) -> None:
    optimizer = ScaleFreeRiemannianAdam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for index in range(steps):
        images, labels = batch(index)
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(images).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", HALF)
def test_training_under_autocast_stays_on_the_manifold(dtype):
    model = tiny_vit()
    before = frame_values(model)
    amp_steps(model, dtype, 10)
    assert all(float((b - a).norm()) > 0.1 for a, b in zip(before, frame_values(model), strict=True))
    assert largest_defect(model) < 1e-5


def test_autocast_leaves_the_frames_gradients_in_float32():
    model = tiny_vit()
    images, labels = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images).float(), labels)
    loss.backward()
    assert {frame.grad.dtype for _, frame in stiefel_geo.frames(model)} == {torch.float32}


def test_a_float16_overflow_leaves_model_and_state_as_they_were():
    model = tiny_vit()
    optimizer, scaler = ScaleFreeRiemannianAdam(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    train(model, optimizer, range(1))
    before = [p.detach().clone() for p in model.parameters()]
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    scaler.scale(loss_of(model, 1)).backward()
    grad_of(next(iter(model.parameters())))[...] = torch.inf
    scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(m, s["exp_avg"]) for m, s in zip(moments, optimizer.state.values(), strict=True))


def test_a_bfloat16_model_has_float32_frames_and_stays_on_the_manifold():
    model = tiny_vit(patched=False).bfloat16()
    stiefel_geo.patch(model)
    assert {frame.dtype for frame in frame_values(model)} == {torch.float32}
    assert qkv(model).weight.dtype == torch.bfloat16
    train(model, ScaleFreeRiemannianAdam(model.parameters(), lr=1e-2), range(10))
    assert largest_defect(model) < 1e-5


def test_a_patched_model_cast_to_bfloat16_trains_through_float32_masters():
    model = tiny_vit().bfloat16()
    optimizer = ScaleFreeRiemannianAdam(model.parameters(), lr=1e-2)
    train(model, optimizer, range(10))
    masters = [optimizer.state[frame]["master"] for _, frame in stiefel_geo.frames(model)]
    assert max(float(defect(master).max()) for master in masters) < 1e-5


def test_a_patched_model_compiles_and_trains_as_it_does_eagerly():
    eager, model = tiny_vit(depth=1), tiny_vit(depth=1)
    compiled = torch.compile(model, fullgraph=torch.__version__ >= ONE_GRAPH_FROM, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    for running in (eager, compiled):
        train(running, ScaleFreeRiemannianAdam(running.parameters(), lr=1e-3), range(3))
    assert gap(eager, model) < 1e-5


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module, Tensor]:
    """The plain model, its patched twin, and images."""
    return tiny_vit(patched=False, depth=1).eval(), tiny_vit(depth=1).eval(), batch(0)[0]


STRICT = pytest.param(True, marks=pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.8's compiler raises"))


@pytest.mark.parametrize("strict", [STRICT, False])
def test_an_exported_program_equals_the_unpatched_model(models, strict):
    plain, patched, images = models
    program = torch.export.export(patched, (images,), strict=strict)
    torch.testing.assert_close(program.module()(images), plain(images), atol=1e-5, rtol=0)


def export_dynamo(model: nn.Module, images: Tensor, path: Path) -> None:
    if torch.__version__ < ONE_GRAPH_FROM:
        pytest.skip("this torch's dynamo exporter writes a bool where today's protobuf takes an int")
    torch.onnx.export(model, (images,), path, dynamo=True, verbose=False)


def export_torchscript(model: nn.Module, images: Tensor, path: Path) -> None:
    torch.onnx.export(model, (images,), path, dynamo=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised inside both exporters
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # timm's shape checks
@pytest.mark.parametrize("export", [export_dynamo, export_torchscript])
def test_onnxruntime_runs_the_patched_model_as_torch_runs_the_unpatched(
    export: Callable[..., object], models, tmp_path
):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=NO_ONNX)
    onnxruntime = pytest.importorskip("onnxruntime", reason=NO_ONNX)
    plain, patched, images = models
    export(patched, images, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    np.testing.assert_allclose(logits, plain(images).detach().numpy(), atol=1e-4, rtol=0)
