"""Two processes over gloo: DDP, accumulation, ZeRO, FSDP2 and checkpoints that change the number of ranks.

Everything runs in one pair of processes (ranks.py); the tests read the figures that it leaves.
Trajectories are compared in float64: in float32 AdamW divides the rounding noise in the gradient of key biases,
which is zero in exact arithmetic, by its own size, whatever drives the frames.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import geoopt
import pytest
import torch
from support import finalisation, ranks
from support.example_scripts import EXAMPLES, validation
from support.tiny_vit import tiny_vit

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam
from stiefel_geo.integrations.fsdp_memory import estimate

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")

Figures = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What each rank measured."""
    return ranks.measured(ranks.main, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("run", ["ddp", "ddp float32", "no_sync"])
def test_ranks_stay_bit_equal_under_ddp(figures, run):
    assert [rank[run]["spread"] for rank in figures] == [0.0, 0.0]


def test_ddp_equals_one_process_with_the_joined_batch(figures):
    assert max(rank["ddp"]["gap"] for rank in figures) < 1e-10


def test_frames_under_ddp_in_float32_equal_those_of_one_process(figures):
    assert max(rank["ddp float32"]["frames' gap"] for rank in figures) < 1e-5


@pytest.mark.parametrize("run", ["ddp", "ddp float32"])
def test_ddp_keeps_every_parameter_in_its_memory(figures, run):
    assert not any(rank[run]["moved"] for rank in figures)


def test_ddp_in_float32_ends_on_the_manifold(figures):
    assert max(rank["ddp float32"]["defect"] for rank in figures) < 1e-5


def test_accumulation_under_no_sync_equals_the_sum_of_losses(figures):
    assert max(rank["no_sync"]["gap"] for rank in figures) < 1e-10


def test_zero_redundancy_equals_one_process_with_the_joined_batch(figures):
    assert max(rank["zero"]["gap"] for rank in figures) < 1e-10


def test_zero_redundancy_shares_the_state_out(figures):
    shares = [rank["zero"]["share"] for rank in figures]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) < 0.6


def test_fsdp2_equals_one_process_with_the_joined_batch(figures):
    assert max(rank["fsdp"]["gap"] for rank in figures) < 1e-10


def test_frames_under_fsdp2_in_float32_equal_those_of_one_process(figures):
    assert max(rank["fsdp float32"]["frames' gap"] for rank in figures) < 1e-5


def test_fsdp2_steps_local_frames_with_local_state(figures):
    assert [(rank["fsdp"]["local frames"], rank["fsdp"]["local momentum"]) for rank in figures] == [
        (2, (2, 32, 16))
    ] * 2


def test_fsdp2_in_bfloat16_keeps_float32_frames_on_the_manifold(figures):
    assert [rank["bfloat16"]["dtypes"] for rank in figures] == [{torch.float32}] * 2
    assert max(rank["bfloat16"]["defect"] for rank in figures) < 1e-5


def test_fsdp2_counts_all_frames(figures):
    assert [rank["fsdp"]["frames"] for rank in figures] == [8, 8]


def test_the_memory_estimate_is_what_a_rank_holds(figures):
    expected, rank = estimate(ranks.build(torch.float32), ranks.WORLD), figures[0]["fsdp float32"]
    assert rank["bytes"] == expected.weights
    assert rank["state bytes"] == pytest.approx(expected.state, rel=0.01)


def test_a_checkpoint_of_two_ranks_resumes_on_one(figures):
    assert figures[0]["one rank"]["gap"] < 1e-10


def test_a_checkpoint_of_one_rank_resumes_on_two(figures):
    assert max(rank["back"]["gap"] for rank in figures) < 1e-10


def test_a_sharding_that_splits_frames_is_refused_with_the_reason(figures):
    for rank in figures:
        assert (
            "found shape (4, 32, 16) with placements (Shard(dim=1),): it would split frames" in rank["split"]["refusal"]
        )


def test_frames_in_a_flat_parameter_of_fsdp1_are_refused():
    flat = torch.nn.Parameter(torch.zeros(8))  # FSDP1 itself needs an accelerator
    vars(flat)["_fqns"] = ("blocks.0.attn.qkv.parametrizations.weight.0.frames",)
    with pytest.raises(ValueError, match=r"inside the flat parameters of FullyShardedDataParallel.*use .*fully_shard"):
        ScaleFreeRiemannianAdam([flat])


def test_frames_that_fsdp1_flattened_in_place_are_refused():
    model = tiny_vit(depth=1)
    _, frame = next(stiefel_geo.frames(model))
    frame.data = frame.data.flatten()[:100]
    assert isinstance(frame, geoopt.ManifoldParameter)
    with pytest.raises(ValueError, match="a rank holds whole frames"):
        ScaleFreeRiemannianAdam(model.parameters())


def test_ranks_end_without_finalising_python(tmp_path):
    """One of gloo's threads that let a tensor go meanwhile would abort them (pytorch#190489)."""
    ranks.measured(finalisation.main, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank 0.pt", "rank 1.pt"]


def test_ranks_of_the_validation_end_without_finalising_python(tmp_path, monkeypatch):
    several_gpus = validation["several_gpus"]
    monkeypatch.setattr(several_gpus, "on_rank", finalisation.main)
    monkeypatch.setattr(several_gpus, "WAYS", {})
    list(several_gpus.compared(SimpleNamespace(device=str(tmp_path))))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank 0.pt", "rank 1.pt"]


def test_finetune_runs_under_torchrun_and_one_process_writes(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "finetune.py")]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *command, "--smoke", "--arm", "stiefel", "--out", str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("stiefel epoch 2") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["defect"] < 1e-5 for row in rows] == [True, True]
