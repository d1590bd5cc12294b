"""Labelled images for fine-tuning: scikit-learn's digits, CIFAR-10, or any folder or tar that timm reads."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from bad_input import BadInput
from PIL import Image
from process_group import rank, share
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import create_dataset, create_transform, resolve_model_data_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Source(Protocol):
    """A split: `source[i]` is (RGB image, label)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...


@dataclass(frozen=True)
class Images:
    """Two splits with the same classes, and whether a mirrored image keeps its class."""

    train: Source
    test: Source
    classes: int
    mirror: bool


class TimmImages:
    """Images through timm's reader, but one that cannot be decoded is an error instead of its neighbour."""

    def __init__(self, root: Path) -> None:
        try:
            self.reader = create_dataset("", root=str(root), search_split=False).reader
            self.classes = sorted({Path(name).parent.name for name in self.reader.filenames()})
        except (OSError, EOFError, RuntimeError, ValueError) as error:  # tarfile errors are OSErrors
            raise BadInput(f"{root} must be a folder or tar of images, one folder a class: {error}") from error

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            file, label = self.reader[index][:2]
            with file:
                return Image.open(file).convert("RGB"), label
        except (OSError, SyntaxError, ValueError) as error:
            name = self.reader.filename(index)
            raise BadInput(f"every image must be readable: {name} is not ({error}); mend or remove it") from error


def load_images(data: str, root: Path | None, download: bool) -> Images:
    """The images that `--data` names."""
    if data == "digits":
        return digits()
    if data == "cifar10":
        return cifar10(root, download)
    return from_path(Path(data))


def digits() -> Images:
    """1,797 handwritten digits of 8×8 pixels in scikit-learn's default split (3 : 1), stratified, seed 0."""
    values, labels = load_digits(return_X_y=True)
    pixels = np.uint8(np.round(values.reshape(-1, 8, 8) * (255 / 16)))
    pairs = [(Image.fromarray(p).convert("RGB"), int(label)) for p, label in zip(pixels, labels, strict=True)]
    train, test = train_test_split(pairs, stratify=labels, random_state=0)
    return Images(train, test, classes=10, mirror=False)


def cifar10(root: Path | None, download: bool) -> Images:
    """torchvision's CIFAR-10 under `root`."""
    if root is None:
        raise BadInput("--data cifar10 needs a folder: none was given; add --root DIR")
    try:
        train, test = (
            create_dataset("torch/cifar10", root=str(root), split=split, download=download)
            for split in ("train", "test")
        )
    except (OSError, RuntimeError) as error:
        raise BadInput(f"--root must hold CIFAR-10: {root} does not ({error}); add --download") from error
    return Images(train, test, classes=10, mirror=True)


def from_path(path: Path) -> Images:
    """Folders or tars `train` and `test` (or `val`, `validation`) under `path`, one folder a class in each."""
    if not path.is_dir():
        raise BadInput(f"--data must be digits, cifar10 or an existing folder: {path} is none; check the path")
    train, test = (TimmImages(_find(path, names)) for names in (("train",), ("test", "val", "validation")))
    if train.classes != test.classes:
        alone = sorted(set(train.classes) ^ set(test.classes))
        raise BadInput(
            f"train and test must hold the same classes: {', '.join(alone[:5])} is in one of them alone "
            f"({len(train.classes)} against {len(test.classes)} under {path}); add or remove the folders"
        )
    return Images(train, test, classes=len(train.classes), mirror=True)


def _find(path: Path, names: Sequence[str]) -> Path:
    for name in names:
        for candidate in (path / name, path / f"{name}.tar"):
            if candidate.exists():
                return candidate
    raise BadInput(f"{path} must hold a folder or tar named {' or '.join(names)}: there is none; add it")


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


def prepare(
    images: Images, model: nn.Module, size: int, limits: tuple[int | None, int | None]
) -> tuple[Prepared, Prepared]:
    """Train and test images under timm's transforms: light crops (and mirroring) for training alone."""
    config = resolve_model_data_config(model)
    colours = {key: config[key] for key in ("mean", "std", "interpolation")}
    train = create_transform(
        size, is_training=True, scale=(0.7, 1.0), hflip=0.5 * images.mirror, color_jitter=None, **colours
    )
    test = create_transform(size, crop_pct=1.0, **colours)
    return Prepared(images.train, train, limits[0]), Prepared(images.test, test, limits[1])


def shuffled(data: Prepared, batch_size: int, seed: int, epoch: int, workers: int) -> DataLoader[Any]:
    """Batches in an order, and with augmentation, that follow from (seed, epoch) alone.

    So a resumed run sees what the uninterrupted one would have seen, and both arms see the same. Several processes
    share every batch out.
    Seeds every global generator: the transforms draw from them.
    """
    key = seed * 1_000_003 + epoch
    random.seed(key)
    np.random.seed(key % 2**32)
    generator = torch.manual_seed(key)
    order, size = share(torch.randperm(len(data), generator=generator).tolist(), batch_size)
    for seeded in (random.seed, np.random.seed, torch.manual_seed) if rank() else ():
        seeded((key + 7_919 * rank()) % 2**32)  # other images, other augmentations
    return DataLoader(
        data, size, sampler=order, num_workers=workers, generator=torch.Generator().manual_seed(key),
        drop_last=len(data) >= batch_size,
    )  # fmt: skip
