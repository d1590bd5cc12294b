"""What a run leaves for the eye: metrics.jsonl, curves.png and the closing table."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .atomic_files import fill, write_atomically

Row = Mapping[str, Any]  # one arm, one epoch
CURVES = {
    "train_loss": "training loss",
    "test_accuracy": "test accuracy",
    "defect": "largest defect",
    "movement": "median movement in a step",
}
DEFECTS = (1e-8, 1e-3)  # the axis, the same in every picture
DEFECT_BOUND = 1e-5  # of float32 frames, which the tests hold over 100,000 steps


def write_metrics(rows: Sequence[Row], path: Path) -> None:
    """One line of JSON an epoch; the whole file anew, so that a killed run leaves no torn or doubled line."""
    text = "".join(json.dumps(_finite(row)) + "\n" for row in rows)
    write_atomically(path, lambda part: fill(part, text.encode()))


def _finite(row: Row) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Every arm in one picture: loss, accuracy, how orthonormal the frames are, and how far they go."""
    figure = Figure(figsize=(15, 3.6), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            seen = [row for row in rows if row["arm"] == arm and row.get(key) is not None]
            if seen:
                axes.plot(
                    [row["epoch"] for row in seen], [row[key] for row in seen], marker="o", markersize=3, label=arm
                )
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        if key == "defect":
            axes.set(yscale="log", ylim=DEFECTS)
            axes.axhline(DEFECT_BOUND, color="black", linestyle="--", linewidth=1, label="bound of the tests")
        if axes.lines:
            axes.legend()
    write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=120))


def log_scalars(row: Row, folder: Path) -> None:
    """Every number of a row to TensorBoard, under the names of metrics.jsonl."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for key, value in row.items():
            if isinstance(value, int | float) and key != "epoch":
                writer.add_scalar(key, value, row["epoch"])


def closing_table(rows: Sequence[Row], frames: Mapping[str, int]) -> str:
    """One line an arm: the last epoch's scores, the whole run's largest defect and median movement."""
    head = ("arm", "test accuracy", "test loss", "seconds", "frames", "largest defect", "movement per step")
    lines = [head, *(_summary(arm, [row for row in rows if row["arm"] == arm], frames[arm]) for arm in frames)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _summary(arm: str, rows: Sequence[Row], frames: int) -> tuple[str, ...]:
    last = rows[-1]
    movements = sorted(row["movement"] for row in rows if row["movement"] is not None)
    return (
        arm,
        f"{last['test_accuracy']:.4f}",
        f"{last['test_loss']:.4f}",
        f"{last['seconds']:.1f}",
        str(frames),
        f"{max(row['defect'] for row in rows):.1e}" if frames else "-",
        f"{movements[len(movements) // 2]:.1e}" if movements else "-",
    )


def verdict(rows: Sequence[Row], arms: Sequence[str], images: int) -> str:
    """What the table shows, in one sentence.

    Two equal arms differ on as many images as only one of them gets right: at most all that either gets wrong, and
    by chance on twice the square root of that.
    """
    right = {arm: _right(arm, rows, images) for arm in arms}
    if len(right) == 1:
        return "".join(f"{arm} gets {count} of {images} test images right" for arm, count in right.items())
    better, worse = sorted(right, key=lambda arm: right[arm], reverse=True)
    apart, chance = right[better] - right[worse], 2 * math.sqrt(sum(images - count for count in right.values()))
    if apart <= chance:
        return f"level: the arms are {apart} of {images} test images apart, and chance alone explains {chance:.0f}"
    return f"{better} is ahead by {apart} of {images} test images, and chance alone explains {chance:.0f}"


def _right(arm: str, rows: Sequence[Row], images: int) -> int:
    """Test images that the arm's last epoch gets right."""
    last = [row for row in rows if row["arm"] == arm][-1]
    return round(float(last["test_accuracy"]) * images)
