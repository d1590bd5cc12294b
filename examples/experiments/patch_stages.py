"""Which runs the patch experiment consists of, in the order of their worth: screen, tuning, pairs, curves, growth.

The learning rate of queries and keys is k times that of the rest. An arm is tuned over both on validation images, with
a seed that no pair has. Arms whose step is shorter by nature (a sum of squares in place of a mean, or no second
moment) get larger values of k.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import Config, Record
from .patch_training import FIRST_GRID_SEED

WORTH = (
    5.0  # points that training queries and keys must gain over freezing them, for a configuration to be the main one
)
SCREENED: dict[str, dict[str, Any]] = {  # what differs from the base
    "base": {},
    "narrow positions": {"position": "narrow"},
    "fixed positions": {"position": "sin-cos"},
    "16 tokens": {"patch": 8},
    "logit gain": {"gain": True},
    "4 layers": {"depth": 4},
    "1 layer": {"depth": 1},
}
SCREEN_CELLS = (  # arm, lr of the rest, k
    ("frozen", 1e-3, 1), ("adamw", 1e-3, 3), ("adamw", 1e-3, 10), ("scale_free", 1e-3, 10),
    ("frozen", 3e-3, 1), ("frozen", 1e-2, 1), ("adamw", 3e-3, 1), ("scale_free", 3e-3, 3),
)  # fmt: skip
K = {1e-3: (1, 3, 10, 30, 100), 3e-3: (0.3, 1, 3, 10, 30), 1e-2: (0.3, 1)}  # lr of the rest: values of k
OTHER_K = {1e-3: (1, 3, 10, 30, 100), 3e-3: (1, 3, 10, 30)}  # of arms outside the headline
SHORT_K = {1e-3: (10, 30, 100, 300, 1000), 3e-3: (100, 300, 1000, 3000)}  # of those with a shorter step at equal lr
SHORT = ("geoopt_adam", "riemannian_sgd", "pogo")
MANY_K = {3e-3: (0.3, 1, 3, 10), 1e-3: (10,)}  # on more images, where a run takes four times as long
HEADLINE = ("adamw", "scale_free")
TUNED = ("adamw", "scale_free", "adamw_default_init", "geoopt_adam", "riemannian_sgd", "muon", "pogo", "adamw_no_decay")
VARIANTS = ("scale_free_canonical", "scale_free_elementwise", "scale_free_uncapped")  # take ours' k
CUSTOMARY = (
    ("frozen", 1), ("riemannian_sgd", 100), ("adamw", 1), ("adamw_default_init", 1), ("scale_free", 1),
    ("adamw", 10), ("scale_free", 10),
)  # fmt: skip
EPOCHS = 8
BASE_IMAGES, MANY_IMAGES = 4000, 16_000
PAIRS, OTHER_PAIRS, FEWEST = 12, 5, 3


def base(args: argparse.Namespace) -> dict[str, Any]:
    """What every run of a command has in common."""
    return {
        "experiment": "patches", "data": Path(args.data).name, "mirror": args.data != "digits", "side": args.side,
        "patch": 4, "position": args.position, "gain": False, "batch": args.batch_size, "decay": args.weight_decay,
        "width": args.width, "depth": args.depth, "heads": args.heads, "bf16": args.bf16,
    }  # fmt: skip


def one(common: Config, arm: str, lr: float, k: float, seed: int, images: int = BASE_IMAGES) -> Config:
    """One run: as many images, each seen EPOCHS times."""
    steps = max(8, EPOCHS * images // common["batch"])
    return {**common, "images": images, "steps": steps, "arm": arm, "seed": seed, "lr": lr, "k": float(k)}


def grid_of(arm: str) -> Mapping[float, Sequence[float]]:
    """The learning rates and values of k that an arm is tuned over."""
    if arm == "frozen":
        return dict.fromkeys(K, (1,))
    return SHORT_K if arm in SHORT else K if arm in HEADLINE else OTHER_K


def screen_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    """Is it worth training queries and keys at all? One seed, validation images."""
    for changes in SCREENED.values():
        for arm, lr, k in SCREEN_CELLS:
            yield one({**common, **changes}, arm, lr, k, FIRST_GRID_SEED)


def tune_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    """Both learning rates of every arm, at the base size."""
    for arm in ("frozen", *TUNED):
        for lr, ks in grid_of(arm).items():
            yield from (one(common, arm, lr, k, FIRST_GRID_SEED) for k in ks)


def tune_many_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    """The same for the headline arms on more images."""
    for lr, ks in MANY_K.items():
        yield from (one(common, arm, lr, k, FIRST_GRID_SEED, MANY_IMAGES) for k in ks for arm in HEADLINE)
    yield from (one(common, "frozen", lr, 1, FIRST_GRID_SEED, MANY_IMAGES) for lr in (3e-3, 1e-2))


def headline(common: Config, found: Sequence[Record], images: int, seeds: range) -> Iterator[Config]:
    """Ours as tuned, AdamW with ours' learning rates and as tuned itself, and frozen frames as tuned."""
    ours, theirs, frozen = (chosen(found, common, images, arm) for arm in (*HEADLINE[::-1], "frozen"))
    for seed in seeds:
        yield one(common, "scale_free", *ours, seed, images)
        yield from (one(common, "adamw", lr, k, seed, images) for lr, k in dict.fromkeys([ours, theirs]))
        if seed < OTHER_PAIRS:
            yield one(common, "frozen", *frozen, seed, images)


def curves(common: Config, found: Sequence[Record], images: int, seeds: range) -> Iterator[Config]:
    """Accuracy against k at the lr of the rest that AdamW was best at, with the frozen frames beside it."""
    lr, _ = chosen(found, common, BASE_IMAGES, "adamw")
    for seed in seeds:
        for arm in ("frozen", *HEADLINE):
            yield from (one(common, arm, lr, k, seed, images) for k in grid_of(arm)[lr])


def first_pairs_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    yield from headline(common, found, MANY_IMAGES, range(OTHER_PAIRS))


def all_pairs_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    yield from headline(common, found, MANY_IMAGES, range(PAIRS))


def base_pairs_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    yield from headline(common, found, BASE_IMAGES, range(PAIRS))


def float32_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    """The same pairs with products in float32: do the differences depend on how products are rounded?"""
    yield from ({**config, "bf16": False} for config in base_pairs_stage(common, found))


def curves_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    yield from curves(common, found, BASE_IMAGES, range(OTHER_PAIRS))


def small_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    yield from curves(common, found, BASE_IMAGES // 4, range(OTHER_PAIRS))


def curves_many_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    yield from curves(common, found, MANY_IMAGES, range(FEWEST))


def largest_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    """All images that are not held out."""
    yield from headline(common, found, 3 * MANY_IMAGES, range(FEWEST))


def arms_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    """Every other arm as tuned, the ablations with ours' learning rates."""
    ours = chosen(found, common, BASE_IMAGES, "scale_free")
    for seed in range(OTHER_PAIRS):
        for arm in TUNED[2:]:
            yield one(common, arm, *chosen(found, common, BASE_IMAGES, arm), seed)
        yield from (one(common, arm, *ours, seed) for arm in VARIANTS)


def customary_stage(common: Config, found: Sequence[Record]) -> Iterator[Config]:
    """Nothing tuned: AdamW's and ours' usual 1e-3, SGD's usual 0.1; and ten times the lr for queries and keys alone."""
    for seed in range(OTHER_PAIRS):
        for arm, k in CUSTOMARY:
            yield one(common, arm, 1e-3, k, seed)


Stage = Callable[[Config, Sequence[Record]], Iterator[Config]]
STAGES: Mapping[str, Stage] = {
    "screen": screen_stage, "tune": tune_stage, "tune_many": tune_many_stage, "curves": curves_stage,
    "first_pairs": first_pairs_stage, "base_pairs": base_pairs_stage, "arms": arms_stage,
    "customary": customary_stage, "small": small_stage, "curves_many": curves_many_stage,
    "all_pairs": all_pairs_stage, "largest": largest_stage, "float32": float32_stage,
}  # fmt: skip


def tuning(found: Sequence[Record], common: Config, images: int) -> dict[tuple[str, float, float], float]:
    """{(arm, lr, k): validation accuracy} of the tuning runs of a size."""
    return {
        (config["arm"], config["lr"], config["k"]): record["val_accuracy"]
        for record in found
        if (config := record["config"])["seed"] == FIRST_GRID_SEED and {**config, **common, "images": images} == config
    }


def best(found: Sequence[Record], common: Config, images: int, arm: str) -> tuple[float, float] | None:
    """The lr of the rest and the k with the best validation accuracy, at this size or the nearest tuned below it."""
    for size in (size for size in (MANY_IMAGES, BASE_IMAGES) if size <= max(images, BASE_IMAGES)):
        tuned = tuning(found, common, size).items()
        scores = {(lr, k): score for (name, lr, k), score in tuned if name == arm}
        if scores:
            return max(scores, key=scores.__getitem__)
    return None


class NotTuned(SystemExit):
    """A comparison was asked for before its arms were tuned."""


def chosen(found: Sequence[Record], common: Config, images: int, arm: str) -> tuple[float, float]:
    cell = best(found, common, images, arm)
    if cell is None:
        raise NotTuned(f"patches: {arm} must be tuned before it is compared: no tuning run found; run --stages tune")
    return cell
