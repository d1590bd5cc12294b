"""One run of the patch experiment, from its config to its record: data order, schedule, steps, scores."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stiefel_geo import stiefel

from .frame_steps import Moving, as_arm, optimizers
from .harness import Config, Record
from .patch_transformer import PatchTransformer, frames, others, replace_frames, spectrum

FIRST_GRID_SEED = 100  # runs that tune have seeds from here on, and are scored on validation images
VALIDATION, TEST = 2000, 5000
MARKS = 8  # rows of metrics a run
LOOK_EVERY = 10  # steps between two looks at how far the frames move


class Split:
    """Images of one run on its device, reduced to side × side pixels by averaging; bytes unless averaged."""

    def __init__(self, pixels: Tensor, labels: Tensor, side: int, device: str) -> None:
        pixels = pixels.to(device)
        self.images = pixels if pixels.shape[-1] == side else F.adaptive_avg_pool2d(pixels.float(), side)
        self.labels = labels.to(device)


def normalised(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def splits(pixels: dict[str, Tensor], config: Config, device: str) -> tuple[Split, Split, Split]:
    """Training images drawn by the run's seed, and validation and test images that are the same for every run."""
    order = torch.randperm(len(pixels["train"]), generator=torch.Generator().manual_seed(0))
    validation = order[: min(VALIDATION, len(order) // 5)]
    pool = order[len(validation) :]
    drawn = torch.randperm(len(pool), generator=torch.Generator().manual_seed(config["seed"]))
    chosen = pool[drawn[: config["images"]]]
    test = torch.randperm(len(pixels["test"]), generator=torch.Generator().manual_seed(0))[:TEST]
    train, labels = pixels["train"], pixels["train_labels"]
    return (
        Split(train[chosen], labels[chosen], config["side"], device),
        Split(train[validation], labels[validation], config["side"], device),
        Split(pixels["test"][test], pixels["test_labels"][test], config["side"], device),
    )


def batches(data: Split, config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches in an order that follows from the seed alone; half of the images mirrored unless digits."""
    generator = torch.Generator().manual_seed(config["seed"] + 7)
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < config["batch"]:
            order = torch.cat([order, torch.randperm(len(data.labels), generator=generator)])
        now, order = order[: config["batch"]], order[config["batch"] :]
        mirrored = (torch.rand(len(now), generator=generator) < 0.5) & config["mirror"]
        images = data.images[now.to(data.images.device)]
        mask = mirrored.to(images.device)[:, None, None, None]
        yield normalised(torch.where(mask, images.flip(-1), images)), data.labels[now.to(data.labels.device)]


@torch.no_grad()
def scores(model: nn.Module, data: Split) -> tuple[float, float]:
    """Loss and accuracy."""
    logits = torch.cat([model(normalised(chunk)) for chunk in data.images.split(250)])
    right = (logits.argmax(1) == data.labels).float().mean()
    return float(F.cross_entropy(logits, data.labels)), float(right)


def schedule(step: int, steps: int) -> float:
    """Linear warm-up over a twentieth of the run, then a cosine to zero; between 0 and 1."""
    warm = max(1, steps // 20)
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Looks:
    """How far the frames move in one step: RMS over the entries of each frame, kept for every tenth step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.moved: list[float] = []

    def around(self, step: Callable[[], None], look: bool) -> None:
        before = [frame.detach().clone() for frame in frames(self.model)] if look else []
        step()
        for old, new in zip(before, frames(self.model) if look else [], strict=True):
            self.moved += (new.detach() - old).square().mean((-2, -1)).sqrt().tolist()

    def median(self) -> float | None:
        """None where no step was looked at."""
        return float(np.median(self.moved)) if self.moved else None


def loss_and_hits(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and the share of right answers."""
    logits = model(images)
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()


fused_loss_and_hits = torch.compile(loss_and_hits)  # with bfloat16 products it takes 0.6 of the time on our CPUs


def build(config: Config, device: str) -> tuple[nn.Module, list[Moving]]:
    """The pair's common start, with the frames as the arm wants them, and the arm's optimizers."""
    torch.manual_seed(config["seed"])
    model = PatchTransformer(config)
    replace_frames(model, as_arm(config["arm"], frames(model), config["seed"]))
    model.to(device)
    return model, optimizers(config["arm"], frames(model), others(model), config["lr"], config["decay"], config["k"])


def train(model: nn.Module, opts: list[Moving], data: Split, config: Config) -> list[Record]:
    """All steps of a run; one row of metrics at each of MARKS equal parts."""
    rows: list[Record] = []
    looks, sums, steps = Looks(model), torch.zeros(2), config["steps"]
    forward = fused_loss_and_hits if config["bf16"] else loss_and_hits
    groups = [group for opt in opts for group in opt.param_groups]
    peaks = [group["lr"] for group in groups]

    def move() -> None:
        for opt in opts:
            opt.step()

    for step, (images, labels) in zip(range(steps), batches(data, config), strict=False):
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * schedule(step, steps)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=config["bf16"]):
            loss, hits = forward(model, images, labels)
        model.zero_grad()
        loss.backward()
        looks.around(move, look=step % LOOK_EVERY == 0)
        sums += torch.stack([loss.detach(), hits]).cpu()
        if (step + 1) * MARKS // steps > step * MARKS // steps:
            done = step + 1 - (rows[-1]["step"] if rows else 0)
            rows.append({
                "step": step + 1, "epoch": (step + 1) * config["batch"] / len(data.labels),
                "train_loss": float(sums[0]) / done, "train_accuracy": float(sums[1]) / done,
                "movement": looks.median(),
            })  # fmt: skip
            looks, sums = Looks(model), torch.zeros(2)
    return rows


@torch.no_grad()
def travelled(start: list[Tensor], end: list[nn.Parameter]) -> float:
    """Median over the parameters of ‖W_end − W_start‖/‖W_start‖."""
    return float(np.median([float((b - a).norm() / a.norm()) for a, b in zip(start, end, strict=True)]))


def run(config: Config, pixels: dict[str, Tensor], device: str) -> Record:
    """One run, from its config to its record; tuning runs never see the test images, paired runs no others."""
    data, validation, test = splits(pixels, config, device)
    model, opts = build(config, device)
    start = [frame.detach().clone() for frame in frames(model)]
    rows = train(model, opts, data, config)
    capped = [state["capped"] for opt in opts for state in opt.state.values() if "capped" in state]
    name, held_out = ("val", validation) if config["seed"] >= FIRST_GRID_SEED else ("test", test)
    loss, accuracy = scores(model, held_out)
    return {
        f"{name}_loss": loss, f"{name}_accuracy": accuracy,
        "movement": float(np.median([row["movement"] for row in rows if row["movement"] is not None])),
        "travelled": travelled(start, frames(model)),
        "capped": int(sum(int(c.sum()) for c in capped)),
        "defect": max(float(stiefel.defect(frame).max()) for frame in frames(model)),
        "spectrum": spectrum(model),
        "rows": rows,
    }  # fmt: skip
