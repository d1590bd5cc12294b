"""A Lightning callback that logs what the frames do. Needs `pip install stiefel-geo[lightning]`."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from stiefel_geo import diagnostics


class FrameDiagnostics(Callback):
    """Logs, every `every` batches, the largest defect and the median movement of the frames in that batch's step.

        trainer = Trainer(callbacks=[FrameDiagnostics(every=50)])

    Under the names "frames/defect" and "frames/movement", to every logger of the trainer. A batch in between costs
    nothing; a measured one costs a copy of the frames. With gradient accumulation choose `every` as a multiple of
    the accumulated batches less one, or the measured batch may be one that does not step.
    """

    def __init__(self, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"rule: every ≥ 1; found {every}; give the number of batches between two looks")
        self.every = every
        self._before: diagnostics.Snapshot | None = None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.every == 0:
            self._before = diagnostics.snapshot(module)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        moved = torch.cat(list(diagnostics.movement(module, self._before).values()))
        defects = torch.cat(list(diagnostics.defect(module).values()))
        self._before = None
        module.log_dict({"frames/defect": defects.max(), "frames/movement": moved.median()})
