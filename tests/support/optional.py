"""Packages that a test needs and the library does not."""

from typing import Any

import pytest


def needs(package: str) -> Any:
    """The package, or a skip that says how to get it."""
    return pytest.importorskip(package, reason=f"{package} is an optional package of the tests: pip install {package}")
