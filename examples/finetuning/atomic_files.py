"""Files that are either whole or absent, whatever kills the process that writes them."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in the place of `path` in one rename.

    Both the file and its folder are fsynced: after a power cut the name leads to the old content or to
    the new one, never to a part. On any error the old file stays and the temporary one goes.
    """
    part = path.with_name(f".{path.name}.part")  # one name, so that what a kill leaves is overwritten
    try:
        write(part)
        _sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def fill(part: Path, content: bytes | memoryview) -> None:
    """For `write_atomically`, where the content is at hand (and with the umask's permissions)."""
    part.write_bytes(content)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write tensors in plain containers, so that `load_state` needs no code from the file.

    Through memory: on a full disk `torch.save` itself hides the OSError behind one that names its own source lines.
    """
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(path, lambda part: fill(part, content.getbuffer()))


def load_state(path: Path) -> dict[str, Any]:
    """Read a `save_state` file: nothing but tensors and plain containers, every checksum verified."""
    with zipfile.ZipFile(path) as archive:  # torch.load itself reads over flipped bits
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} is damaged")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"holds a {type(state).__name__}, not a dict")
    return state


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
