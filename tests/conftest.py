"""Which tests are the core, which a run leaves out, each with its reason, and which come first."""

import os
from collections.abc import Iterator

import pytest
import torch

# Beginnings of the files' names beyond the core: every class of attention, whole programs, several processes.
BEYOND_CORE = (
    "test_timm_attention",
    "test_timm_models",
    "test_transformers",
    "test_finetune",
    "test_pretrain",
    "test_optimize_frame",
    "test_watching",
    "test_docs",
    "test_distributed",
    "test_device_costs",
    "test_experiment",
    "test_evidence",
    "test_frame_steps",
    "test_paired_statistics",
    "test_patch_experiment",
    "test_grokking",
    "test_validate_gpu",
    "test_long_runs",
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draws without a generator of their own, those of constructors too, are the same in every order of tests."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For figures that are compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from every run but that of `-m cuda`, before torch looks for them; processes that tests start too."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)  # before -m reads the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the core; skip `slow` tests unless -m names them or RUN_SLOW=1 is set, and `cuda` tests without a device.

    Tests that fork come first: a child of a process in which torch.compile has started autograd's threads cannot train.
    """
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)
    wanted = "slow" in config.option.markexpr or os.environ.get("RUN_SLOW") == "1"
    for item in items:
        if not item.path.name.startswith(BEYOND_CORE):
            item.add_marker("core")
        if not wanted and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run it with -m slow or RUN_SLOW=1"))
        if not torch.cuda.is_available() and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="cuda: torch sees no CUDA device"))
