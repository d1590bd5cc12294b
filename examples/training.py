"""One arm of a comparison: a model, its optimizer, and the epochs they have behind them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import stiefel_geo
from stiefel_geo import patching, stiefel

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
        """Loss and accuracy."""
        return float(self.loss) / max(1, self.images), float(self.right) / max(1, self.images)


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

    def frames(self) -> list[Tensor]:
        """Every frame parameter, shape (frames, d, r); none in a plain model."""
        return [frame for _, frame in stiefel_geo.frames(self.model)]

    def frame_count(self) -> int:
        return sum(frame[..., 0, 0].numel() for frame in self.frames())

    def defect(self) -> float | None:
        """Largest distance of a frame from orthonormality."""
        return max((float(stiefel.defect(frame).max()) for frame in self.frames()), default=None)

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
        self.scaler.load_state_dict(state["scaler"])
        self.rows = list(state["rows"])


def build_optimizer(name: str, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW on timm's groups, or ScaleFreeRiemannianAdam on the package's: same lr, same decay rule."""
    if name == "adamw":
        skip = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        return torch.optim.AdamW(param_groups_weight_decay(model, weight_decay, skip), lr=lr)
    groups = param_groups(model, weight_decay)
    return stiefel_geo.ScaleFreeRiemannianAdam(groups, lr=lr, weight_decay=weight_decay)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    skip = {name for name, _ in [*stiefel_geo.frames(model), *patching.cores(model)]}
    skip |= model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    decayed = [p for name, p in model.named_parameters() if p.ndim >= 2 and name not in skip]
    kept = [p for name, p in model.named_parameters() if p.ndim < 2 or name in skip]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def train_epoch(arm: Arm, batches: Iterable[tuple[Tensor, Tensor]], steps: int, title: str) -> dict[str, Any]:
    """One epoch; returns its row of metrics, the test scores still missing."""
    epoch, tally, movements, started = len(arm.rows), Tally(), [], time.perf_counter()
    defect = arm.defect()
    arm.model.train()
    with tqdm(batches, desc=title, total=steps, disable=None, leave=False) as bar:
        for step, (images, labels) in enumerate(bar):
            arm.scheduler.step_update(epoch * steps + step)
            look = step % WATCH_EVERY == 0 or step == steps - 1
            before = [frame.detach().clone() for frame in arm.frames()] if look else []
            train_step(arm, images.to(arm.device), labels.to(arm.device), tally)
            if look:
                movements += movement(before, arm.frames())
                defect = max(defect, arm.defect()) if before else None
                loss, accuracy = tally.means()
                rate = tally.images / (time.perf_counter() - started)
                worst = {} if defect is None else {"defect": f"{defect:.1e}"}
                bar.set_postfix({"loss": f"{loss:.3f}", "acc": f"{accuracy:.3f}", "img/s": f"{rate:.0f}", **worst})
    loss, accuracy = tally.means()
    seconds = time.perf_counter() - started
    return {
        "arm": arm.name, "epoch": epoch + 1, "lr": arm.optimizer.param_groups[0]["lr"],
        "train_loss": loss, "train_accuracy": accuracy, "defect": defect,
        "movement": median(movements), "images_per_second": tally.images / seconds, "seconds": seconds,
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


def movement(before: list[Tensor], after: list[Tensor]) -> list[float]:
    """‖W_after − W_before‖_F of each single frame."""
    norms = [torch.linalg.matrix_norm(b - a.detach()).flatten() for b, a in zip(before, after, strict=True)]
    return torch.cat(norms).tolist() if norms else []


def median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
