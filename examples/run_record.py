"""What a run leaves for the eye: metrics.jsonl, curves.png and the closing table."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atomic_files import fill, write_atomically
from matplotlib.figure import Figure

Row = Mapping[str, Any]  # one arm, one epoch
CURVES = (("train_loss", "training loss"), ("test_accuracy", "test accuracy"), ("defect", "largest defect"))


def write_metrics(rows: Sequence[Row], path: Path) -> None:
    """One line of JSON an epoch; the whole file anew, so that a killed run leaves no torn or doubled line."""
    text = "".join(json.dumps(_finite(row)) + "\n" for row in rows)
    write_atomically(path, lambda part: fill(part, text.encode()))


def _finite(row: Row) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Every arm in one picture: loss, accuracy, and how far the frames are from orthonormal."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, 3), CURVES, strict=True):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            points = [(row["epoch"], row[key]) for row in rows if row["arm"] == arm and row[key] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=arm)
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        if key == "defect" and axes.lines:
            axes.set_yscale("log")
        if axes.lines:
            axes.legend()
    write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=120))


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
