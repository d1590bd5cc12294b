"""The finished runs of the patch experiment as cells (images, arm, lr of the rest, k), and differences between them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .frame_steps import ARMS
from .harness import Config, Record, key
from .paired_statistics import SAME, Paired, paired
from .patch_stages import BASE_IMAGES, MANY_IMAGES, SCREENED, VARIANTS, WORTH, best, tuning
from .patch_training import FIRST_GRID_SEED

OF_A_RUN = ("arm", "seed", "lr", "k", "images", "steps")
SIZES = (BASE_IMAGES // 4, BASE_IMAGES, MANY_IMAGES, 3 * MANY_IMAGES)


class Cell(NamedTuple):
    """What the seeds of one figure have in common."""

    images: int
    arm: str
    lr: float
    k: float


class PatchRuns:
    """The runs of one configuration, by default that of most pairs, by cell and seed; tuning runs apart."""

    def __init__(self, records: Sequence[Record], configuration: Config | None = None) -> None:
        self.records = records
        self.pairs = [record for record in records if record["config"]["seed"] < FIRST_GRID_SEED]
        counts = Counter(key(common(record["config"])) for record in self.pairs)
        self.common = configuration or (json.loads(counts.most_common(1)[0][0]) if counts else {})
        self.cells: dict[Cell, dict[int, Record]] = {}
        for record in self.pairs:
            config = record["config"]
            if common(config) == self.common:
                cell = Cell(config["images"], config["arm"], config["lr"], config["k"])
                self.cells.setdefault(cell, {})[config["seed"]] = record

    def others(self) -> Iterator[tuple[str, "PatchRuns"]]:
        """The screened configurations that have pairs too, by name."""
        for name, changes in SCREENED.items():
            other = PatchRuns(self.records, {**self.common, **changes})
            if changes and other.cells:
                yield name, other

    def in_float32(self) -> "PatchRuns":
        """The runs of the same configuration with float32 products."""
        return PatchRuns(self.records, {**self.common, "bf16": False})

    def tuned(self, images: int, arm: str) -> Cell:
        """The cell that an arm is compared at; ablations take ours' learning rates. NaN where nothing is tuned."""
        cell = best(self.records, self.common, images, "scale_free" if arm in VARIANTS else arm)
        return Cell(images, arm, *(cell or (math.nan, math.nan)))

    def values(self, cell: Cell, metric: str = "test_accuracy") -> dict[int, float]:
        return {seed: record[metric] for seed, record in self.cells.get(cell, {}).items()}

    def differences(self, one: Cell, other: Cell) -> list[float]:
        """Test accuracy of one − other in points, for every seed that both have."""
        a, b = self.values(one), self.values(other)
        return [100 * (a[seed] - b[seed]) for seed in sorted(a.keys() & b.keys())]

    def gain(self, one: Cell, other: Cell) -> Paired:
        return paired(self.differences(one, other))

    def ratio(self, one: Cell, other: Cell, metric: str) -> Paired:
        """Geometric mean, with interval, of one ÷ other."""
        a, b = self.values(one, metric), self.values(other, metric)
        logs = paired([math.log(a[seed] / b[seed]) for seed in sorted(a.keys() & b.keys())])
        return logs._replace(mean=math.exp(logs.mean), low=math.exp(logs.low), high=math.exp(logs.high))

    def curve(self, images: int, arm: str, lr: float) -> dict[float, list[float]]:
        """{k: test accuracies, %, over the seeds}."""
        found = {cell.k: self.values(cell) for cell in self.cells if cell[:3] == (images, arm, lr)}
        return {k: [100 * value for value in found[k].values()] for k in sorted(found)}

    def chosen_by_others(self, images: int, arm: str, lr: float) -> dict[int, float]:
        """{seed: test accuracy at the k that is best over the other seeds}, for seeds with the whole curve."""
        found = {cell.k: self.values(cell) for cell in self.cells if cell[:3] == (images, arm, lr)}
        seeds = set.intersection(*(set(values) for values in found.values())) if len(found) > 1 else set()
        result = {}
        for seed in sorted(seeds) if len(seeds) > 1 else ():
            means = {k: np.mean([values[other] for other in seeds - {seed}]) for k, values in found.items()}
            result[seed] = found[max(means, key=means.__getitem__)][seed]
        return result

    def slopes(self, cells: Callable[[int], tuple[Cell, Cell]], sizes: Sequence[int]) -> list[float]:
        """For each seed by how many points the gain grows with every doubling of the images; seeds with all sizes."""
        gains: dict[int, list[tuple[float, float]]] = {}
        for images in sizes:
            one, other = (self.values(cell) for cell in cells(images))
            for seed in one.keys() & other.keys():
                gains.setdefault(seed, []).append((math.log2(images), 100 * (one[seed] - other[seed])))
        whole = [points for _, points in sorted(gains.items()) if len(points) == len(sizes) > 1]
        lines = (zip(*points, strict=True) for points in whole)
        return [float(np.polyfit(doublings, points, 1)[0]) for doublings, points in lines]

    def rest_lr(self) -> float:
        """The lr of the rest at which the curves are drawn: AdamW's own."""
        return self.tuned(BASE_IMAGES, "adamw").lr


def common(config: Config) -> Config:
    return {name: value for name, value in config.items() if name not in OF_A_RUN}


def range_of_k(curve: dict[float, list[float]]) -> tuple[float, float]:
    """The smallest and the largest k, without a gap between them, within SAME of the curve's best mean."""
    ks, means = list(curve), [float(np.mean(values)) for values in curve.values()]
    good = [mean >= max(means) - SAME for mean in means]
    first = last = int(np.argmax(means))
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(ks) and good[last + 1]:
        last += 1
    return ks[first], ks[last]


def tuning_curves(runs: PatchRuns, images: int) -> dict[tuple[str, float], dict[float, list[float]]]:
    """{(arm, lr of the rest): {k: [validation accuracy, %]}}, arms in their usual order."""
    result: dict[tuple[str, float], dict[float, list[float]]] = {}
    scores = tuning(runs.records, runs.common, images)
    for arm, lr, k in sorted(scores, key=lambda cell: (ARMS.index(cell[0]), *cell[1:])):
        result.setdefault((arm, lr), {})[k] = [100 * scores[arm, lr, k]]
    return result


def screen(runs: PatchRuns) -> Iterator[tuple[str, float, float, float]]:
    """(configuration, lr of the rest, frozen, best trained): validation accuracy, %, of one seed."""
    for name, changes in SCREENED.items():
        scores = tuning(runs.records, {**runs.common, **changes}, BASE_IMAGES)
        for rate in sorted({lr for _, lr, _ in scores}):
            frozen = [v for (arm, lr, _), v in scores.items() if lr == rate and arm == "frozen"]
            trained = [v for (arm, lr, _), v in scores.items() if lr == rate and arm in ("adamw", "scale_free")]
            if frozen and trained:
                yield name, rate, 100 * frozen[0], 100 * max(trained)


def passes(frozen: float, trained: float) -> bool:
    """The rule stated before the runs."""
    return trained - frozen >= WORTH
