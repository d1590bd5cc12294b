"""One optimizer step on the frames of ViT-Ti to ViT-L: host and device time, launches and memory, beside others."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmark import HEAD_WIDTH, VITS, median, transient_bytes
from benchmarking import arms
from torch import Tensor

from stiefel_geo import ScaleFreeRiemannianAdam, stiefel

from .rows import Row, Settings, at_most, left_out

# Launches and transient memory over the frames', as `tests/test_device_costs.py` counts them without a GPU.
COUNTED = {"Ti": (60, 5.67), "S": (60, 5.34), "B": (211, 0.8), "L": (295, 0.8)}
KERNELS = 1.25  # to a launch that is counted, at most: a product may take two, and so may a layer decay's lrs
LARGEST_DEFECT = 1e-5
REPEATS = 20
TINY = {"tiny": (96, 1, 1)}  # width, layers, heads
Step = Callable[[], Any]
Build = Callable[[list[Tensor], list[Tensor]], Step]


def rows(settings: Settings) -> Iterator[Row]:
    torch.manual_seed(0)
    for model, shape in sizes(settings).items():
        frames, grads = drawn(shape, settings)
        yield from of_ours(model, frames, grads, settings)
        for name, build in ways(settings).items():
            yield timed_row(f"ViT-{model}, {name}", build, (frames, grads), settings)
    if not settings.cuda:
        yield left_out("a step captured in a graph", "it needs a CUDA device")
    if "POGO + VectorAdam" not in arms.arms():
        yield left_out("POGO", 'it is not installed: pip install -e ".[benchmark]"')


def sizes(settings: Settings) -> dict[str, tuple[int, int, int]]:
    return TINY if settings.smoke else VITS


def drawn(shape: tuple[int, int, int], settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    """Frames, drawn on the CPU, since a draw takes an SVD, and gradients."""
    d, layers, heads = shape
    frames = [stiefel.random_frame(2 * heads, d, HEAD_WIDTH).to(settings.device) for _ in range(layers)]
    return frames, [1e-3 * torch.randn_like(W) for W in frames]


def of_ours(model: str, frames: list[Tensor], grads: list[Tensor], settings: Settings) -> Iterator[Row]:
    """What is bounded: launches, memory, and that the frames are still frames."""
    title, (counted, held) = f"ViT-{model}", COUNTED.get(model, (None, None))
    for kind, optimizer in {"one group": arms.ours(frames, grads), "layer decay": layerwise(frames, grads)}.items():
        optimizer.step()
        bound = KERNELS * counted if settings.cuda and counted else None
        found = launches(optimizer.step) if settings.cuda else None
        name = f"{title}, ours, {kind}: launches"
        yield left_out(name, "only a CUDA device has them") if found is None else at_most(name, found, bound)
        share = transient_bytes(optimizer.step, settings.device) / sum(4 * W.numel() for W in frames)
        memory = f"{title}, ours, {kind}: transient memory over the frames'"
        yield at_most(memory, share, held if settings.cuda else None)
        yield at_most(f"{title}, ours, {kind}: largest defect", arms.largest_defect(optimizer), LARGEST_DEFECT)


def ways(settings: Settings) -> dict[str, Build]:
    """Everything that is timed: ours in the ways that the device allows, then the others."""
    others = {name: _step_of(arm) for name, arm in arms.arms().items()}
    ours = {"ours": others.pop("ours"), "ours, layer decay": _step_of(layerwise)}
    if settings.cuda:
        ours["ours, captured in a graph"] = captured
    return ours | others


def _step_of(arm: arms.Arm) -> Build:
    return lambda frames, grads: arm(frames, grads).step


def timed_row(name: str, build: Build, given: tuple[list[Tensor], list[Tensor]], settings: Settings) -> Row:
    """Its time; where it fails, ours breaks the validation, and what others cannot do is noted."""
    try:
        return Row(name, times(build(*given), 1 if settings.smoke else REPEATS, settings))
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        return Row(name, said, "runs", False if "ours" in name else None)


def layerwise(frames: Any, grads: Any) -> ScaleFreeRiemannianAdam:
    """Ours with one group a layer, each with its own lr."""
    params = [p for group in arms.ours(frames, grads).param_groups for p in group["params"]]
    return ScaleFreeRiemannianAdam([{"params": [p], "lr": arms.LR * 0.75**i} for i, p in enumerate(params)])


def captured(frames: list[Tensor], grads: list[Tensor]) -> Step:
    """Ours as a CUDA graph, which is replayed."""
    params = [p for group in arms.ours(frames, grads).param_groups for p in group["params"]]
    optimizer = ScaleFreeRiemannianAdam(params, lr=arms.LR, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as torch's notes on graphs warm up: the state is made outside the graph
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def times(step: Step, repeats: int, settings: Settings) -> str:
    """Median milliseconds until the call returns, and on CUDA until the device is done, apart."""
    for _ in range(min(3, repeats)):
        step()
    if not settings.cuda:
        return f"{median([timed(step) for _ in range(repeats)]):.3g} ms"
    host, device = [], []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        host.append(timed(step))
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end))
    return f"host {median(host):.3g} ms, events {median(device):.3g} ms"


def timed(step: Step) -> float:
    started = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - started)


def launches(step: Step) -> int:
    """Kernels, copies and fills that one step starts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
