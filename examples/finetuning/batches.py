"""From images to batches on the device: transformed, thinned, shuffled, shared out."""

import os
import random
from typing import Any

import numpy as np
import torch
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .image_data import Images, Source
from .process_group import rank, share, world

MOST_WORKERS = 8


class Prepared(Dataset[tuple[Tensor, int]]):
    """A source as the model wants it: transformed, and thinned to `limit` images.

    Files come sorted by class, so the thinning draws at random, always the same images.
    """

    def __init__(self, source: Source, transform: Any, limit: int | None) -> None:
        order = np.random.RandomState(0).permutation(len(source))
        self.indices = order[:limit] if limit else order
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.source[int(self.indices[index])]
        return self.transform(image), label


class Drawn(Dataset[tuple[Tensor, int]]):
    """Images whose augmentation follows from (key, index) alone, in whatever process they are loaded."""

    def __init__(self, images: Dataset[tuple[Tensor, int]], key: int) -> None:
        self.images, self.key = images, key

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        seed = (self.key << 32) + index
        random.seed(seed)  # timm draws crops from it
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed % 2**63)  # torchvision draws mirrorings from it
            return self.images[index]


def prepare(
    images: Images, model: nn.Module, size: int, limits: tuple[int | None, int | None]
) -> tuple[Prepared, Prepared]:
    """Train and test images under timm's transforms: light crops (and mirroring) for training alone."""
    config = resolve_model_data_config(model)
    colours = {key: config[key] for key in ("mean", "std", "interpolation")}
    crops: dict[str, Any] = {"scale": (0.7, 1.0), "hflip": 0.5 * images.mirror, "color_jitter": None}
    train = create_transform(size, is_training=True, **crops, **colours)
    test = create_transform(size, crop_pct=1.0, **colours)
    return Prepared(images.train, train, limits[0]), Prepared(images.test, test, limits[1])


def loading(device: str, workers: int | None) -> dict[str, Any]:
    """DataLoader's options: on CUDA, processes that load ahead (as many as given, or chosen here) and pinned memory."""
    ahead = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // world())) if device == "cuda" else 0
    return {"num_workers": ahead if workers is None else workers, "pin_memory": device == "cuda"}


def shuffled(data: Prepared, batch_size: int, seed: int, epoch: int, options: dict[str, Any]) -> DataLoader[Any]:
    """Batches in an order, and with augmentation, that follow from (seed, epoch) alone.

    So a resumed run sees what the uninterrupted one would have seen, and both arms see the same. Several processes
    share every batch out. Seeds torch's generators, which dropout draws from, each process's apart.
    """
    key = seed * 1_000_003 + epoch
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(key)).tolist()
    torch.manual_seed(key + 7_919 * rank())
    part, size = share(order, batch_size)
    return DataLoader(Drawn(data, key), size, sampler=part, drop_last=len(data) >= batch_size, **options)


def moved(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels on the device; from pinned memory the copy overlaps with what is computed there."""
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    return images, labels
