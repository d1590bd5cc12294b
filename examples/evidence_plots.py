"""The pictures of the evidence report; every pair is drawn."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from atomic_files import write_atomically
from evidence import BASELINE, OURS, Arms, differences
from harness import Record
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from paired_statistics import paired


def save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=110, metadata={"Software": None}))


def draw_pairs(arms: Arms, path: Path) -> None:
    """Each arm's difference to AdamW: one grey dot a pair, the mean with its 95 % interval."""
    others = [arm for arm in arms if arm != BASELINE and differences(arms, arm, BASELINE)]
    figure = Figure(figsize=(7, 0.55 * len(others) + 1.2), layout="constrained")
    axes = figure.subplots()
    for y, arm in enumerate(others):
        points = differences(arms, arm, BASELINE)
        summary = paired(points)
        axes.plot(points, np.full(len(points), y), "o", color="0.6", markersize=4)
        if summary.n > 1:
            axes.errorbar(
                summary.mean, y, xerr=[[summary.mean - summary.low], [summary.high - summary.mean]],
                fmt="s", color="tab:blue" if arm == OURS else "black", capsize=4, markersize=5,
            )  # fmt: skip
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_yticks(range(len(others)), others)
    axes.set(xlabel="test accuracy minus adamw's, points", title="paired differences")
    axes.invert_yaxis()
    save(figure, path)


def draw_pair_lines(arms: Arms, path: Path) -> None:
    """Every pair of the main comparison as a line from AdamW's accuracy to ours."""
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    for seed in sorted(arms[BASELINE].keys() & arms[OURS].keys()):
        ends = [100 * arms[arm][seed]["test_accuracy"] for arm in (BASELINE, OURS)]
        axes.plot([0, 1], ends, "o-", color="tab:blue" if ends[1] > ends[0] else "tab:red", alpha=0.7)
    axes.set_xticks([0, 1], [BASELINE, OURS])
    axes.set(ylabel="test accuracy, %", xlim=(-0.3, 1.3), title="every pair (blue: ours is ahead)")
    save(figure, path)


def draw_phase(cells: Mapping[tuple[float, int], Sequence[float]], path: Path) -> None:
    """Mean gain over weight decay × images, with each cell's interval and number of pairs."""
    decays, sizes = sorted({decay for decay, _ in cells}), sorted({size for _, size in cells})
    grid = np.full((len(decays), len(sizes)), np.nan)
    figure = Figure(figsize=(1.9 * len(sizes) + 2, 0.9 * len(decays) + 1.3), layout="constrained")
    axes = figure.subplots()
    for (decay, size), gains in cells.items():
        y, x = decays.index(decay), sizes.index(size)
        summary = paired(gains)
        grid[y, x] = summary.mean
        spread = f"\n[{summary.low:+.1f}, {summary.high:+.1f}]" if summary.n > 1 else ""
        axes.text(x, y, f"{summary.mean:+.2f}{spread}\nn = {summary.n}", ha="center", va="center", fontsize=8)
    reach = max(1.0, float(np.nanmax(np.abs(grid))))
    image = axes.imshow(grid, cmap="RdBu", vmin=-reach, vmax=reach, alpha=0.6, aspect="auto", origin="lower")
    figure.colorbar(image, label="gain over adamw, points")
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set_yticks(range(len(decays)), [f"{decay:g}" for decay in decays])
    axes.set(xlabel="training images", ylabel="weight decay", title="when it dominates, and when it does not")
    save(figure, path)


def draw_movement(arms: Arms, path: Path) -> None:
    """How far a frame's entries move per step over the run, one line a run."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, arm in enumerate(arm for arm in arms if arm != "frozen"):
        for place, record in enumerate(arms[arm].values()):
            rows = [row for row in record["rows"] if row["movement"]]
            label = f"{arm} (lr {record['config']['lr']:g})" if place == 0 else None
            steps, moved = zip(*((row["step"], row["movement"]) for row in rows), strict=True)
            axes.plot(steps, moved, color=f"C{number}", alpha=0.5, linewidth=1, label=label)
    axes.set(yscale="log", xlabel="step", ylabel="RMS change of an entry per step", title="movement of the frames")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    save(figure, path)


CURVES: tuple[tuple[str, Callable[[Record], float], str], ...] = (
    ("training accuracy", lambda row: row["train_accuracy"], "linear"),
    ("validation accuracy", lambda row: row["val_accuracy"], "linear"),
    ("norm of the output logits", lambda row: row["logit_norm"], "log"),
    ("smallest singular value of Q, K", lambda row: row["smallest"], "linear"),
)


def draw_grokking(records: Sequence[Record], path: Path) -> None:
    """Curves of every run; a dip of training accuracy after it had reached 1 is a collapse."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    panels: list[Axes] = list(figure.subplots(2, 2).flat)
    for axes, (title, value, scale) in zip(panels, CURVES, strict=True):
        for record in records:
            ours = record["config"]["arm"] == OURS
            label = record["config"]["arm"] if record["config"]["seed"] == 0 else None
            epochs = [row["epoch"] for row in record["rows"]]
            values = [value(row) for row in record["rows"]]
            axes.plot(epochs, values, color="tab:blue" if ours else "tab:orange", alpha=0.6, linewidth=0.9, label=label)
        axes.set(title=title, xlabel="epoch", yscale=scale)
        axes.grid(alpha=0.3)
    panels[0].legend()
    save(figure, path)
