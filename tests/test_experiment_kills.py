"""The experiments' grids after kill -9 at random moments: the same command ends with the uninterrupted records."""

import os
import random
import shutil

import pytest
import torch
from support.evidence_scripts import grokking, harness, patches
from support.kills import FORK, killed_after, seconds_of

pytestmark = pytest.mark.forks

KILLS = int(os.environ.get("KILLS", "10"))
NOT_COMPUTED = {"seconds", "versions", "commit", "dirty"}
SCRIPTS = {
    "patches": (patches, ["--smoke"]),
    "grokking": (grokking, ["--p", "7", "--width", "16", "--heads", "2", "--seeds", "2", "--epochs", "150"]),
}


@pytest.fixture(autouse=True)
def _grokking_saves_often(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(grokking, "ROW_EVERY", 10)
    monkeypatch.setattr(grokking, "SAVE_EVERY", 30)
    yield
    torch.set_num_threads(threads)


def in_child(script, options, folder):
    """The script's main in a forked process."""
    argv = [*options, "--out", str(folder / "runs.jsonl"), "--work", str(folder / "work")]
    process = FORK.Process(target=script.main, args=(argv,))
    process.start()
    return process


def computed(folder):
    """The finished runs in order, without what the clock and the repository say."""
    records = harness.read_records(folder / "runs.jsonl")
    return [{key: value for key, value in record.items() if key not in NOT_COMPUTED} for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_one_of_10_kills_of_a_grid_ends_with_the_uninterrupted_records(tmp_path, name):
    seconds = seconds_of(in_child(*SCRIPTS[name], tmp_path / "whole"))
    whole = computed(tmp_path / "whole")
    rng = random.Random(0)
    landed: list[int] = []
    while len(landed) < KILLS:
        folder = tmp_path / f"killed{len(landed)}"
        if not killed_after(in_child(*SCRIPTS[name], folder), rng.uniform(0.02, 0.98) * seconds):
            shutil.rmtree(folder)
            continue
        landed.append(len(computed(folder)))
        assert computed(folder) == whole[: landed[-1]]
        process = in_child(*SCRIPTS[name], folder)
        process.join()
        assert process.exitcode == 0
        assert computed(folder) == whole, f"kill {len(landed)}, runs done: {landed[-1]}"
    print(f"{name}: {KILLS} of {KILLS} resumed; of {len(whole)} runs done at the kill: {landed}")
    assert len(set(landed)) > 2  # they landed in different places
