"""examples/harness.py: every run is made once, whatever kills the process that makes it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from support.evidence_scripts import EXAMPLES, harness

GRID = [{"arm": arm, "seed": seed} for seed in range(3) for arm in ("a", "b")]

SLOW_GRID = """
import sys, time
from pathlib import Path
sys.path.insert(0, {examples!r})
from experiments.harness import run_grid

def run(config):
    time.sleep(0.15)
    with open({diary!r}, "a") as file:
        file.write(str(config["seed"]) + "\\n")
    return {{"score": config["seed"]}}

run_grid([{{"seed": seed}} for seed in range(8)], run, Path({path!r}))
"""


def slow_grid(tmp_path):
    """A process with a grid of eight runs, which notes every run that it ends in a diary."""
    names = {"examples": str(EXAMPLES), "diary": str(tmp_path / "diary"), "path": str(tmp_path / "runs.jsonl")}
    return subprocess.Popen([sys.executable, "-c", SLOW_GRID.format(**names)], stderr=subprocess.DEVNULL)


def seeds(path):
    return [record["config"]["seed"] for record in harness.read_records(path)]


def test_each_run_leaves_one_line_with_config_result_and_provenance(tmp_path):
    path = tmp_path / "deep" / "runs.jsonl"
    assert harness.run_grid(GRID, lambda config: {"score": config["seed"]}, path) == 6
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["config"] for record in records] == GRID
    assert [record["score"] for record in records] == [0, 0, 1, 1, 2, 2]
    assert set(records[0]["versions"]) == {"python", "stiefel-geo", "torch", "geoopt", "timm", "numpy"}
    assert records[0].keys() >= {"commit", "dirty", "seconds"}


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("stiefel_geo/stiefel.py", True), ("integrations/timm_attention.py", True), ("examples/finetune.py", True),
        ("examples/results/runs.jsonl", False), ("README.md", False),
    ],
)  # fmt: skip
def test_edited_sources_are_dirty_and_the_growing_results_are_not(tmp_path, file, counts):
    for name in ("stiefel_geo/stiefel.py", "integrations/timm_attention.py", "examples/finetune.py", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as committed\n")
    (tmp_path / "examples/results").mkdir()
    (tmp_path / "examples/results/runs.jsonl").write_text("")
    (tmp_path / "stiefel_geo/integrations").symlink_to("../integrations")
    who = ["-c", "user.name=t", "-c", "user.email=t"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert not harness.dirty(tmp_path / "examples")
    (tmp_path / file).write_text("edited\n")
    assert harness.dirty(tmp_path / "examples") is counts


def test_finished_runs_are_not_run_again(tmp_path):
    path, made = tmp_path / "runs.jsonl", []

    def run(config):
        made.append(config)
        return {}

    harness.run_grid(GRID[:4], run, path)
    assert harness.run_grid(GRID, run, path) == 2
    assert made == GRID


def test_half_a_line_is_dropped_and_its_run_made_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    harness.run_grid(GRID[:2], lambda config: {"score": 1}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [record["config"] for record in harness.read_records(path)] == GRID[:1]
    assert harness.run_grid(GRID[:2], lambda config: {"score": 1}, path) == 1
    assert [json.loads(line)["config"] for line in path.read_text().splitlines()] == GRID[:2]


def test_a_claimed_run_is_left_to_its_holder_and_taken_over_when_that_ends_without_a_result(tmp_path):
    path, made = tmp_path / "runs.jsonl", []
    with ExitStack() as holder:
        assert holder.enter_context(harness.claim(path, GRID[0]))

        def run(config):
            made.append(config)
            holder.close()  # as if the holder were killed now
            return {}

        assert harness.run_grid(GRID[:2], run, path) == 2
    assert made == [GRID[1], GRID[0]]


def test_kill_9_loses_the_running_run_alone(tmp_path):
    path = tmp_path / "runs.jsonl"
    process = slow_grid(tmp_path)
    deadline = time.monotonic() + 60
    while len(harness.read_records(path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = seeds(path)
    assert 2 <= len(finished) < 8
    assert slow_grid(tmp_path).wait() == 0
    assert sorted(seeds(path)) == list(range(8))
    diary = (tmp_path / "diary").read_text().split()
    assert all(diary.count(str(seed)) == 1 for seed in finished)


def test_two_processes_share_a_grid(tmp_path):
    pair = [slow_grid(tmp_path), slow_grid(tmp_path)]
    assert [process.wait() for process in pair] == [0, 0]
    assert sorted((tmp_path / "diary").read_text().split()) == [str(seed) for seed in range(8)]
    assert sorted(seeds(tmp_path / "runs.jsonl")) == list(range(8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_lacks_becomes_null(value):
    assert harness.finite({"rows": [{"loss": value}], "kept": 1.23456789}) == {
        "rows": [{"loss": None}],
        "kept": 1.23457,
    }
