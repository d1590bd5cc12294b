"""How long a step takes beside other optimizers, beside its own arithmetic, and inside a training step.

    python examples/benchmark.py --threads 1 --json benchmark.json --plot benchmark.png

Everything runs in one process, interleaved, on the same gradients, which are drawn anew now and then as in training:
each repeat times every optimizer once, so that a busy machine slows all of them. Figures are medians with (min–max)
of CPU time; --wall prints wall time. The benchmark refuses to run when the step differs from the literal float64 one
of stiefel_geo.optim.literal.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from benchmarking import arms, profiling
from benchmarking.training import training_steps
from torch import Tensor

from stiefel_geo import stiefel

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Width, layers, heads of timm's vision transformers; head width 64 in all.
VITS = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16)}
HEAD_WIDTH = 64
SECTIONS = ["optimizers", "per-head", "layers", "memory", "training", "profile"]
TWIN_TOLERANCE = 1e-6
GRADIENTS = 3  # sets that the repeats go through in turn: one alone would be a noiseless descent, of longer steps
Timings = dict[str, dict[str, list[float]]]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--repeats", type=int, default=11)
    options.add_argument("--models", nargs="+", choices=list(VITS), default=["Ti", "S", "B"])
    options.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    options.add_argument("--json", type=Path)
    options.add_argument("--plot", type=Path)
    options.add_argument("--wall", action="store_true", help="print wall time in place of CPU time")
    options.add_argument("--smoke", action="store_true", help="tiny sizes, one repeat")
    return options


def interleaved(
    steps: dict[str, Callable[[], Any]], repeats: int, device: str, before: Callable[[str, int], Any] | None = None
) -> Timings:
    """Milliseconds of every callable, CPU and wall, in the order of the repeats; two warm-up rounds are dropped.

    `before` gets the name and the repeat ahead of each call, untimed.
    """
    timings: Timings = {name: {"cpu": [], "wall": []} for name in steps}
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            if before:
                before(name, repeat)
            _synchronize(device)
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            _synchronize(device)
            if repeat >= 2:
                timings[name]["cpu"].append(1e3 * (time.process_time() - cpu))
                timings[name]["wall"].append(1e3 * (time.perf_counter() - wall))
    return timings


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def layers_of(model: str, device: str, *, layers: int | None = None, per_head: bool = False) -> list[Tensor]:
    """Frames as the patch lays them out, one (2·heads, d, 64) a layer, or one (d, 64) per head."""
    d, depth, heads = VITS[model]
    stacks = [stiefel.random_frame(2 * heads, d, HEAD_WIDTH, device=device) for _ in range(layers or depth)]
    return [W for stack in stacks for W in stack] if per_head else stacks


def compare(frames: list[Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Every optimizer and the floor on the same frames and gradients, interleaved."""
    grads = [[1e-3 * torch.randn_like(W) for W in frames] for _ in range(GRADIENTS)]
    optimizers = {name: arm(frames, grads[0]) for name, arm in arms.arms().items()}
    steps: dict[str, Callable[[], Any]] = {name: optimizer.step for name, optimizer in optimizers.items()}
    if frames[0].ndim == 3:
        steps |= profiling.floor_of(frames, grads[0])

    def new_gradients(name: str, repeat: int) -> None:
        if name in optimizers:
            arms.give(optimizers[name], grads[repeat % GRADIENTS])

    timings = interleaved(steps, args.repeats, args.device, new_gradients)
    clock = "wall" if args.wall or args.device == "cuda" else "cpu"
    rows = {}
    for name, times in timings.items():
        row: dict[str, Any] = {"ms": median(times[clock]), "range": [min(times[clock]), max(times[clock])], **times}
        if name in optimizers:
            row["defect"] = arms.largest_defect(optimizers[name])
            row["state_bytes"] = arms.state_bytes(optimizers[name])
        rows[name] = row
    return {"clock": clock, "rows": rows}


def transient_bytes(step: Callable[[], Any], device: str) -> int:
    """The most memory that a step holds at once beyond what it started with."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return int(torch.cuda.max_memory_allocated() - before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Transient memory of our step over the bytes of the frames, for every model."""
    shares = {}
    for model in args.models:
        frames = layers_of(model, args.device)
        optimizer = arms.ours(frames, frames)
        optimizer.step()
        shares[model] = transient_bytes(optimizer.step, args.device) / sum(4 * W.numel() for W in frames)
    return shares


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Where the time of our step goes, for every model."""
    found = {}
    for model in args.models:
        frames = layers_of(model, args.device)
        optimizer = arms.ours(frames, [1e-3 * torch.randn_like(W) for W in frames])
        total = median(interleaved({"ours": optimizer.step}, args.repeats, args.device)["ours"]["cpu"])
        found[model] = profiling.shares(optimizer.step, frames, args.repeats, total)
    return found


def growth(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of our step per layer, for 6, 12 and 24 layers of ViT-S."""
    steps: dict[str, Callable[[], Any]] = {}
    for layers in (6, 12, 24):
        frames = layers_of("S", args.device, layers=layers)
        steps[str(layers)] = arms.ours(frames, [1e-3 * torch.randn_like(W) for W in frames]).step
    timings = interleaved(steps, args.repeats, args.device)
    clock = "wall" if args.device == "cuda" else "cpu"
    return {layers: median(times[clock]) / int(layers) for layers, times in timings.items()}


def show(title: str, result: dict[str, Any]) -> None:
    """A Markdown table of one comparison."""
    rows = result["rows"]
    base, products = rows["ours"]["ms"], rows.get("five products", {}).get("ms")
    floor = f", ours ÷ five products {base / products:.2f}" if products else ""
    print(f"\n{title} ({result['clock']} ms a step{floor})\n")
    print("| optimizer | median | min–max | ÷ ours | defect | state MB |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        low, high = row["range"]
        tail = f"{row['defect']:.1e} | {row['state_bytes'] / 1e6:.1f}" if "defect" in row else "– | –"
        print(f"| {name} | {row['ms']:.1f} | {low:.1f}–{high:.1f} | {row['ms'] / base:.2f} | {tail} |")


def plot(results: dict[str, Any], path: Path) -> None:
    """Step time of each optimizer over ours, one group of bars per model."""
    tables = {title: result["rows"] for title, result in results.items() if "rows" in result}
    names = [name for name in next(iter(tables.values())) if name != "ours"]
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for i, (title, rows) in enumerate(tables.items()):
        heights = [rows[name]["ms"] / rows["ours"]["ms"] if name in rows else 0 for name in names]
        axes.bar([x + 0.8 * i / len(tables) for x in range(len(names))], heights, 0.8 / len(tables), label=title)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.3 for x in range(len(names))], names, rotation=20, ha="right")
    axes.set_ylabel("step time ÷ ours")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.smoke:
        args.models, args.repeats, VITS["Ti"] = ["Ti"], 1, (96, 2, 1)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    distance = arms.distance_to_twin()
    if distance > TWIN_TOLERANCE:
        print(f"the step differs from its literal twin by {distance:.1e}; nothing is timed", file=sys.stderr)
        return 1
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {device}, {args.threads} threads, {args.repeats} repeats, twin {distance:.1e}")
    results: dict[str, Any] = {}
    for model in args.models:
        for section, per_head in (("optimizers", False), ("per-head", True)):
            if section in args.sections:
                title = f"ViT-{model}" + (", one parameter per head" if per_head else "")
                results[title] = compare(layers_of(model, args.device, per_head=per_head), args)
                show(title, results[title])
    measures = {"layers": growth, "memory": memory, "training": training_steps, "profile": profile}
    for section, measure in measures.items():
        if section in args.sections and not (section == "profile" and args.device == "cuda"):
            results[section] = measure(args)
            print(f"\n{section}: {json.dumps(results[section])}")
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "plot")}  # paths say nothing
        args.json.write_text(json.dumps({"args": settings, "results": results}, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
