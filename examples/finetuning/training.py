"""One arm of a comparison: a model, its optimizer, and the epochs they have behind them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

import stiefel_geo
from stiefel_geo import diagnostics
from stiefel_geo.optim.checks import check_loaded

from .batches import moved
from .frame_watch import FrameWatch, spectrum
from .process_group import rank, summed, world

Batches = DataLoader[Any]  # of images and labels


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


def build_optimizer(
    name: str, model: nn.Module, lr: float, weight_decay: float, frame_lr_scale: float
) -> torch.optim.Optimizer:
    """AdamW or ScaleFreeRiemannianAdam, in the same parameter groups; the scheduler applies their `lr_scale`."""
    groups = stiefel_geo.param_groups(model, weight_decay, frame_lr_scale=frame_lr_scale)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    return stiefel_geo.ScaleFreeRiemannianAdam(groups, lr=lr)


def train_epoch(arm: Arm, batches: Batches, title: str) -> dict[str, Any]:
    """One epoch; returns its row of metrics, the test scores still missing."""
    tally, watch, started = Tally(), FrameWatch(arm.model), time.perf_counter()
    first = len(arm.rows) * len(batches)
    arm.model.train()
    with tqdm(batches, desc=title, disable=True if rank() else None, leave=False) as bar:
        for step, batch in enumerate(bar):
            arm.scheduler.step_update(first + step)
            with watch.around(step, last=step == len(batches) - 1) as looking:
                train_step(arm, *moved(batch, arm.device), tally)
            if looking:
                bar.set_postfix(shown(tally, watch))
    return epoch_row(arm, tally, watch, time.perf_counter() - started)


def shown(tally: Tally, watch: FrameWatch) -> dict[str, str]:
    """What stands beside the progress bar."""
    loss, accuracy = tally.means()
    worst = {} if watch.defect is None else {"defect": f"{watch.defect:.1e}"}
    return {"loss": f"{loss:.3f}", "acc": f"{accuracy:.3f}", **worst}


def epoch_row(arm: Arm, tally: Tally, watch: FrameWatch, seconds: float) -> dict[str, Any]:
    loss, accuracy = tally.means()
    counts = diagnostics.counts(arm.optimizer)
    return {
        "arm": arm.name, "epoch": len(arm.rows) + 1, "lr": arm.optimizer.param_groups[-1]["lr"],
        "train_loss": loss, "train_accuracy": accuracy, "defect": watch.defect, "movement": watch.movement(),
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
def evaluate(arm: Arm, batches: Batches) -> tuple[float, float]:
    """Loss and accuracy on the test images."""
    arm.model.eval()
    tally = Tally()
    for batch in batches:
        images, labels = moved(batch, arm.device)
        with arm.amp:
            logits = arm.forward(images).float()
        tally.add(logits, labels, F.cross_entropy(logits, labels))
    return tally.means()
