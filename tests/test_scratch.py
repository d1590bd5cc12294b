"""examples/experiments/scratch.py: every arm from its start, and what the report makes of the runs."""

import pytest
import torch
from support.evidence_scripts import harness, scratch, scratch_report

CONFIG = {"arm": "learn", "k": 3.0, "seed": 0, "lr": 1e-3, "decay": 0.05, "side": 16, "depth": 1, "images": 32,
          "steps": 2, "batch": 16}  # fmt: skip


def record(arm, k, seed, accuracy):
    config = {**CONFIG, "arm": arm, "k": k, "seed": seed}
    return {"config": config, "test_accuracy": accuracy, "test_loss": 2.0, "defect": None}


def test_smoke_runs_every_arm_at_every_k_and_a_second_call_adds_nothing(tmp_path):
    out = tmp_path / "runs.jsonl"
    for _ in range(2):
        assert scratch.main(["--smoke", "--out", str(out), "--work", str(tmp_path)]) == 0
        runs = harness.read_records(out)
        assert len(out.read_bytes().splitlines()) == len(runs) == 1 + len(scratch.CORES) * len(scratch.KS)
    held = {run["config"]["arm"]: run["defect"] for run in runs if run["config"]["k"] == 10}
    assert max(held[arm] for arm in ("identity", "learn", "freeze")) < 1e-5 < held["adamw_frames"]


@pytest.mark.parametrize(("one", "other", "same"), [
    ("adamw_frames", "identity", True), ("adamw", "learn", True), ("learn", "freeze", True),
    ("adamw", "identity", False),
])  # fmt: skip
def test_arms_that_are_compared_start_from_one_function(one, other, same):
    images = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    a, b = (scratch.build({**CONFIG, "arm": arm})[0].eval()(images) for arm in (one, other))
    assert torch.allclose(a, b, atol=1e-5) == same


def test_k_scales_the_lr_of_queries_and_keys_alone():
    for arm in ("adamw_frames", "learn"):
        groups = {group["name"]: group["lr_scale"] for group in scratch.build({**CONFIG, "arm": arm})[1].param_groups}
        assert groups.pop("frames") == 3.0
        assert set(groups.values()) == {1.0}


def test_adamw_decays_frames_as_every_matrix_and_ours_does_not():
    for arm, decay in (("adamw_frames", 0.05), ("identity", 0.0)):
        groups = scratch.build({**CONFIG, "arm": arm})[1].param_groups
        assert {group["name"]: group["weight_decay"] for group in groups} == {
            "frames": decay, "decayed": 0.05, "undecayed": 0.0,
        }  # fmt: skip


def test_claims_pair_seeds_of_one_k_and_say_when_they_are_too_few():
    runs = [record(arm, 3.0, seed, 0.3 + (arm == "identity") * 0.05 + seed / 1000)
            for arm in ("identity", "adamw_frames") for seed in range(3)]  # fmt: skip
    (claim,) = scratch_report.scratch_claims(runs)
    assert (claim.figure, claim.verdict) == ("+5.00 points [+5.00, +5.00] (n = 3)", "ahead")
    (few,) = scratch_report.scratch_claims(runs[:1] + runs[3:4])
    assert few.verdict == "cannot decide here: too few pairs"
    assert "| identity, k = 3 | 3 | 35.10 |" in scratch_report.scratch_section(runs)
