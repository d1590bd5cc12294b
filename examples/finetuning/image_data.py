"""Labelled images for fine-tuning: scikit-learn's digits, CIFAR-10, or any folder or tar of image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import create_dataset

from .bad_input import BadInput
from .image_files import ImageFiles


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
    pixels = np.round(values.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
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
    train, test = (ImageFiles(_find(path, names)) for names in (("train",), ("test", "val", "validation")))
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
