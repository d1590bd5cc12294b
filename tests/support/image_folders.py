"""Small folders and tars of images, written anew for each test."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def write_images(folder: Path, classes: Sequence[str], count: int, side: int = 32) -> Path:
    """`count` random PNGs in one folder a class."""
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:03}.png")
    return folder


def write_tar(path: Path, classes: Sequence[str], count: int) -> Path:
    """The same as one tar."""
    folder = write_images(path.with_suffix(""), classes, count)
    with tarfile.open(path, "w") as tar:
        for name in classes:
            tar.add(folder / name, arcname=name)
    return path
