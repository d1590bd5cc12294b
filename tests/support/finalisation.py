"""A rank that leaves a folder behind when Python is finalised at its end."""

import os
from collections.abc import Callable
from pathlib import Path

import torch


class Trace:
    """A folder that appears once this object goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __del__(self, make: Callable[[str], None] = os.mkdir) -> None:  # by then the names of modules are gone
        make(self.folder)


KEPT: list[Trace] = []  # a module lets its objects go when Python is finalised


def main(rank: int, folder: Path | str, *_: str) -> None:
    KEPT.append(Trace(Path(folder) / f"finalised {rank}"))
    torch.save({}, Path(folder) / f"rank {rank}.pt")
