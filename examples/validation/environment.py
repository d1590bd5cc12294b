"""What the figures were measured on."""

import platform
from collections.abc import Iterator
from importlib.metadata import version

import torch

from .rows import Row, Settings

PACKAGES = ("torch", "timm", "geoopt", "stiefel-geo")


def rows(settings: Settings) -> Iterator[Row]:
    if settings.cuda:
        yield Row("CUDA device", f"{torch.cuda.device_count()} seen by torch", "≥ 1", torch.cuda.is_available())
    yield Row("machine", f"{platform.platform()}, Python {platform.python_version()}")
    yield Row("packages", ", ".join(f"{name} {version(name)}" for name in PACKAGES))
    for index in range(torch.cuda.device_count() if settings.cuda else 0):
        found = torch.cuda.get_device_properties(index)
        cuda = f"CUDA {torch.version.cuda}, compute {found.major}.{found.minor}"
        yield Row(f"device {index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {cuda}")
