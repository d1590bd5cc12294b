"""One arm of a comparison: a model, its optimizer, and the epochs they have behind them."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from process_group import rank, summed, world
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import stiefel_geo
from stiefel_geo import diagnostics
from stiefel_geo.checks import check_loaded

WATCH_EVERY = 10  # steps between two looks at the frames: each look waits for the device


@dataclass
class Tally:
    """Running sums of an epoch, kept on the device so that adding to them does not wait for it."""

    images: int = 0
    loss: Tensor | float = 0.0
    right: Tensor | int = 0

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        self.images += len(labels)
        self.loss = self.loss + loss.detach() * len(labels)
        self.right = self.right + (logits.argmax(1) == labels).sum()

    def means(self) -> tuple[float, float]:
        """Loss and accuracy over all processes."""
        images, loss, right = summed(self.images, float(self.loss), float(self.right))
        return loss / max(1, images), right / max(1, images)


@dataclass
class Arm:
    """What is trained, how, and its history. `state` and `load` carry it over a restart, bit for bit."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: CosineLRScheduler
    scaler: torch.amp.GradScaler
    amp: torch.autocast
    forward: Callable[[Tensor], Tensor]
    device: torch.device
    rows: list[dict[str, Any]] = field(default_factory=list)

    def frames(self) -> int:
        """How many frames the model has: none if it is not patched."""
        return sum(frame[..., 0, 0].numel() for _, frame in stiefel_geo.frames(self.model))

    def defect(self) -> float | None:
        """Largest distance of a frame from orthonormality."""
        return max((float(each.max()) for each in diagnostics.defect(self.model).values()), default=None)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rows": self.rows,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if isinstance(self.optimizer, torch.optim.AdamW):
            check_moments(self.optimizer)
        self.scaler.load_state_dict(state["scaler"])
        self.rows = list(state["rows"])


def check_moments(optimizer: torch.optim.AdamW) -> None:
    """Raise ValueError for a loaded state that is not AdamW's: torch loads any, and fails in the first step."""
    for p, state in optimizer.state.items():
        check_loaded(p, state, {"step": torch.zeros(()), "exp_avg": p, "exp_avg_sq": p})


def build_optimizer(name: str, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW or ScaleFreeRiemannianAdam, in the same parameter groups."""
    groups = stiefel_geo.param_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    return stiefel_geo.ScaleFreeRiemannianAdam(groups, lr=lr)


def train_epoch(arm: Arm, batches: Iterable[tuple[Tensor, Tensor]], steps: int, title: str) -> dict[str, Any]:
    """One epoch; returns its row of metrics, the test scores still missing."""
    epoch, tally, lengths, started = len(arm.rows), Tally(), [], time.perf_counter()
    defect = arm.defect()
    arm.model.train()
    with tqdm(batches, desc=title, total=steps, disable=True if rank() else None, leave=False) as bar:
        for step, (images, labels) in enumerate(bar):
            arm.scheduler.step_update(epoch * steps + step)
            before = diagnostics.snapshot(arm.model) if step % WATCH_EVERY == 0 else None
            train_step(arm, images.to(arm.device), labels.to(arm.device), tally)
            if before is not None or step == steps - 1:
                lengths += moved(arm.model, before) if before else []
                defect = None if defect is None else max(defect, arm.defect())
                loss, accuracy = tally.means()
                rate = tally.images / (time.perf_counter() - started)
                worst = {} if defect is None else {"defect": f"{defect:.1e}"}
                bar.set_postfix({"loss": f"{loss:.3f}", "acc": f"{accuracy:.3f}", "img/s": f"{rate:.0f}", **worst})
    loss, accuracy = tally.means()
    seconds, counts = time.perf_counter() - started, diagnostics.counts(arm.optimizer)
    return {
        "arm": arm.name, "epoch": epoch + 1, "lr": arm.optimizer.param_groups[0]["lr"],
        "train_loss": loss, "train_accuracy": accuracy, "defect": defect,
        "movement": statistics.median_low(lengths) if lengths else None,
        **spectrum(arm.model), "capped": int(counts.capped.sum()), "skipped": int(counts.skipped.sum()),
        "images_per_second": tally.images * world() / seconds, "seconds": seconds,
    }  # fmt: skip


def train_step(arm: Arm, images: Tensor, labels: Tensor, tally: Tally) -> None:
    """Forward, backward, step."""
    with arm.amp:
        logits = arm.forward(images)
        loss = F.cross_entropy(logits.float(), labels)
    arm.scaler.scale(loss).backward()
    arm.scaler.step(arm.optimizer)
    arm.scaler.update()
    arm.optimizer.zero_grad()
    tally.add(logits, labels, loss)


@torch.no_grad()
def evaluate(arm: Arm, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Loss and accuracy on the test images."""
    arm.model.eval()
    tally = Tally()
    for images, labels in batches:
        labels = labels.to(arm.device)
        with arm.amp:
            logits = arm.forward(images.to(arm.device)).float()
        tally.add(logits, labels, F.cross_entropy(logits, labels))
    return tally.means()


def spectrum(model: nn.Module) -> dict[str, float]:
    """Smallest, median and largest singular value of all query and key matrices."""
    values = torch.cat([each.flatten() for each in diagnostics.spectrum(model).values()])
    named = {"low": values.min(), "median": values.median(), "high": values.max()}
    return {f"spectrum_{end}": float(value) for end, value in named.items()}


def moved(model: nn.Module, before: diagnostics.Snapshot) -> list[float]:
    """How far each query and key matrix went, the patched model's frames or the plain one's weights alike."""
    return [length for each in diagnostics.movement(model, before).values() for length in each.tolist()]
