"""Image files in a folder or tar, one folder a class: which are read, as what, and what is said of the others."""

import os
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image
from timm.data import create_dataset
from timm.data.readers import set_img_extensions

from .bad_input import BadInput

READ = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class ImageFiles:
    """Images through timm's reader, but one that cannot be decoded is an error instead of its neighbour."""

    def __init__(self, root: Path) -> None:
        set_img_extensions(READ)  # timm's own list lacks most, and it passes over the others without a word
        try:
            self.reader = create_dataset("", root=str(root), search_split=False).reader
            self.classes = sorted({Path(name).parent.name for name in self.reader.filenames()})
            left = unread(files_of(root))
        except (OSError, EOFError, RuntimeError, ValueError) as error:  # tarfile errors are OSErrors
            raise BadInput(f"{root} must be a folder or tar of images, one folder a class: {error}") from error
        if left:
            print(f"{root}: not read, as no images by their names: {left} (read are {', '.join(READ)})")

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            file, label = self.reader[index][:2]
            with file:
                return decoded(file), label
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            name = self.reader.filename(index)
            raise BadInput(f"every image must be readable: {name} is not ({error}); mend or remove it") from error


def decoded(file: IO[bytes]) -> Image.Image:
    """The image in RGB. Grey values of 16 bits keep their upper eight, where Pillow alone would cut them off at 255."""
    image = Image.open(file)
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.uint8(np.asarray(image) >> 8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"its values are neither of 8 nor of 16 bits, but of Pillow's mode {image.mode}")
    return image.convert("RGB")


def files_of(root: Path) -> Iterator[str]:
    """Names of all files in a folder or tar."""
    if root.is_dir():
        for _, _, files in os.walk(root, followlinks=True):
            yield from files
    else:
        with tarfile.open(root) as tar:
            yield from (member.name for member in tar if member.isfile())


def unread(names: Iterable[str]) -> str:
    """The kinds of files that are no images by their names, and how many of each; empty if there are none."""
    kinds = Counter(Path(name).suffix.lower() or Path(name).name for name in names)
    others = sorted((kind, count) for kind, count in kinds.items() if kind not in (*READ, ".tar"))
    return ", ".join(f"{count} × {kind}" for kind, count in others)
