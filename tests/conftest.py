"""Which tests a run leaves out, each with its reason, and which come first."""

import os

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `slow` tests unless -m names them or RUN_SLOW=1 is set, and `cuda` tests where torch sees no device.

    Tests that fork come first: a child of a process in which torch.compile has started autograd's threads cannot train.
    """
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)
    wanted = "slow" in config.option.markexpr or os.environ.get("RUN_SLOW") == "1"
    for item in items:
        if not wanted and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run it with -m slow or RUN_SLOW=1"))
        if not torch.cuda.is_available() and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="cuda: torch sees no CUDA device"))
