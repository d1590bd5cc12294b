"""A whole training step: a patched model with our optimizer beside the unpatched one with AdamW."""

import argparse
import time
from collections.abc import Callable

import timm
import torch

import stiefel_geo

# Model, batch size and image size of the comparison.
WORKLOADS = {"vit_tiny_patch16_224": 64, "vit_small_patch16_224": 16}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def pair(name: str, batch: int, size: int, device: str) -> dict[str, Callable[[], None]]:
    """The two training steps, from the same weights, on the same batch."""
    plain, patched = (timm.create_model(name, num_classes=10, img_size=size).to(device) for _ in range(2))
    patched.load_state_dict(plain.state_dict())
    stiefel_geo.patch(patched)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    ours = stiefel_geo.ScaleFreeRiemannianAdam(patched.parameters(), lr=1e-4)
    x = torch.randn(batch, 3, size, size, device=device)
    y = torch.randint(10, (batch,), device=device)
    return {"AdamW": lambda: _step(plain, adamw, x, y), "patched": lambda: _step(patched, ours, x, y)}


def training_steps(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of each step and the median ratio of neighbouring pairs, patched ÷ unpatched."""
    results = {}
    for name, batch in WORKLOADS.items():
        steps = pair(name, 2 if args.smoke else batch, 32 if args.smoke else 224, args.device)
        times: dict[str, list[float]] = {arm: [] for arm in steps}
        for repeat in range(args.repeats + 1):
            for arm, step in steps.items():
                start = time.process_time() if args.device == "cpu" else time.perf_counter()
                step()
                if args.device == "cuda":
                    torch.cuda.synchronize()
                stop = time.process_time() if args.device == "cpu" else time.perf_counter()
                if repeat:
                    times[arm].append(1e3 * (stop - start))
        ratios = sorted(b / a for a, b in zip(times["AdamW"], times["patched"], strict=True))
        middle = {arm: sorted(values)[len(values) // 2] for arm, values in times.items()}
        results[f"{name}, batch {batch}"] = {**middle, "patched ÷ AdamW": ratios[len(ratios) // 2]}
    return results
