"""The pictures of the results page."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from finetuning.atomic_files import write_atomically
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .evidence import BASELINE, OURS, by_arm, main_configuration, with_endpoints
from .frame_steps import ARMS
from .harness import Record
from .paired_statistics import AHEAD, BEHIND, FEWEST, paired, side
from .patch_evidence import PatchRuns, tuning_curves
from .patch_stages import BASE_IMAGES, HEADLINE

COLOURS = {"scale_free": "tab:blue", "adamw": "tab:orange", "frozen": "0.5"}
NAMES = {"scale_free": "ours", "adamw": "AdamW", "frozen": "frozen"}


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=110, metadata={"Software": None}))


def draw_curves(runs: PatchRuns, sizes: Sequence[int], path: Path) -> None:
    """Test accuracy against k, a panel a size; the bands reach from the worst seed to the best."""
    rows = math.ceil(len(sizes) / 2)  # two beside each other can be read in the width of a page
    figure = Figure(figsize=(8.4, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False).flatten()[: len(sizes)]
    lr = runs.rest_lr()
    for axes, images in zip(panels, sizes, strict=True):
        for arm in HEADLINE:
            curve = runs.curve(images, arm, lr)
            ks, values = list(curve), list(curve.values())
            axes.plot(ks, [np.mean(v) for v in values], "o-", color=COLOURS[arm], label=NAMES[arm])
            axes.vlines(ks, [min(v) for v in values], [max(v) for v in values], color=COLOURS[arm], alpha=0.6)
            axes.fill_between(ks, *zip(*((min(v), max(v)) for v in values), strict=True), color=COLOURS[arm], alpha=0.2)
        still = [100 * v for v in runs.values(runs.tuned(images, "frozen")).values()]
        if still:
            axes.axhspan(min(still), max(still), color=COLOURS["frozen"], alpha=0.2)
            axes.axhline(float(np.mean(still)), color=COLOURS["frozen"], linestyle="--", label="frozen, tuned")
        axes.set(xscale="log", xlabel="k = lr of queries and keys ÷ lr of the rest", title=f"{images:,} images")
        ticks = sorted({k for arm in HEADLINE for k in runs.curve(images, arm, lr)})
        axes.set_xticks(ticks, [f"{k:g}" for k in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.supylabel("test accuracy, %")
    panels[-1].legend()
    save(figure, path)


def draw_tuning(runs: PatchRuns, images: int, path: Path) -> None:
    """Validation accuracy of every arm against the lr of queries and keys, a panel a lr of the rest."""
    curves = {
        cell: curve for cell, curve in tuning_curves(runs, images).items() if cell[0] != "frozen" and len(curve) > 2
    }
    rates = sorted({lr for _, lr in curves})
    figure = Figure(figsize=(5 * len(rates), 4.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(rates), sharey=True))
    for (arm, lr), curve in curves.items():
        wide = {"linewidth": 2.4} if arm in HEADLINE else {"linewidth": 1, "linestyle": "--"}
        colour = COLOURS.get(arm, f"C{2 + ARMS.index(arm) % 8}")
        axes = panels[rates.index(lr)]
        axes.plot([lr * k for k in curve], [v[0] for v in curve.values()], "o", color=colour, markersize=3)
        axes.plot(
            [lr * k for k in curve], [v[0] for v in curve.values()], color=colour, label=NAMES.get(arm, arm), **wide
        )
        axes.set(xscale="log", xlabel="lr of queries and keys", title=f"lr {lr:g} of the rest")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation accuracy, %")
    panels[-1].legend(fontsize=8, loc="lower right")
    save(figure, path)


def draw_pairs(gains: Mapping[str, Sequence[float]], path: Path) -> None:
    """Each arm's difference to AdamW: one grey dot a pair, the mean with its 95 % interval."""
    figure = Figure(figsize=(7, 0.42 * len(gains) + 1.2), layout="constrained")
    axes = figure.subplots()
    for y, (arm, points) in enumerate(gains.items()):
        axes.plot(points, np.full(len(points), y), "o", color="0.6", markersize=4)
        summary = paired(points)
        if summary.n >= FEWEST:
            axes.errorbar(
                summary.mean, y, xerr=[[summary.mean - summary.low], [summary.high - summary.mean]],
                fmt="s", color=COLOURS.get(arm, "black"), capsize=4, markersize=5,
            )  # fmt: skip
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_yticks(range(len(gains)), [NAMES.get(arm, arm) for arm in gains])
    axes.set(xlabel="test accuracy minus AdamW's, points", title="each arm as tuned, paired")
    axes.invert_yaxis()
    save(figure, path)


def draw_phase(cells: Mapping[tuple[float, int], Sequence[float]], row: str, path: Path) -> None:
    """Mean gain over `row` × images; a black frame where the interval leaves 0 out."""
    rows, sizes = sorted({value for value, _ in cells}), sorted({size for _, size in cells})
    grid = np.full((len(rows), len(sizes)), np.nan)
    figure = Figure(figsize=(1.6 * len(sizes) + 2.2, 0.75 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    for (value, size), gains in cells.items():
        y, x, summary = rows.index(value), sizes.index(size), paired(gains)
        grid[y, x] = summary.mean
        spread = f"\n[{summary.low:+.1f}, {summary.high:+.1f}]" if summary.n > 1 else ""
        axes.text(x, y, f"{summary.mean:+.1f}{spread}", ha="center", va="center", fontsize=8)
        if side(summary) in (AHEAD, BEHIND):
            axes.add_patch(Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, fill=False, linewidth=2.2))
    reach = max(1.0, float(np.nanmax(np.abs(grid))))
    image = axes.imshow(grid, cmap="RdBu", vmin=-reach, vmax=reach, alpha=0.6, aspect="auto", origin="lower")
    figure.colorbar(image, label="ours − AdamW, points")
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    axes.set(xlabel="training images", ylabel=row, title="framed: the interval excludes 0")
    save(figure, path)


def draw_grokking(records: Sequence[Record], path: Path) -> None:
    """Modular addition: validation accuracy of every run, a column a seed, a row an arm."""
    arms = by_arm(with_endpoints(records), main_configuration(records))
    seeds = sorted(set(arms[BASELINE]) & set(arms[OURS]))
    figure = Figure(figsize=(2.4 * len(seeds), 3.8), layout="constrained")
    panels = figure.subplots(2, len(seeds), sharex=True, sharey=True, squeeze=False)
    for line, arm in zip(panels, (BASELINE, OURS), strict=True):
        line[0].set_ylabel(f"{NAMES[arm]}, %")
        for axes, seed in zip(line, seeds, strict=True):
            run = arms[arm][seed]
            points = [(row["epoch"], 100 * row["val_accuracy"]) for row in run["rows"]]
            axes.fill_between(*zip(*points, strict=True), color=COLOURS[arm], alpha=0.35)
            axes.plot(*zip(*points, strict=True), color=COLOURS[arm], linewidth=0.8)
            axes.set_title(f"late > 90 %: {run['held']:.0%}; {run['collapses']} collapses", fontsize=8)
            axes.axhline(90, color="0.4", linewidth=0.6)
    figure.suptitle("modular addition: validation accuracy by epoch, one column a seed", fontsize=10)
    save(figure, path)


def arms_against_adamw(runs: PatchRuns) -> dict[str, list[float]]:
    """{arm: differences to AdamW} at the base size, each as tuned."""
    adamw = runs.tuned(BASE_IMAGES, BASELINE)
    found = {arm: runs.differences(runs.tuned(BASE_IMAGES, arm), adamw) for arm in ARMS if arm != BASELINE}
    return {arm: gains for arm, gains in found.items() if gains}
