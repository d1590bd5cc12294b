"""examples/finetune.py: what a run leaves, and that it goes on after any end."""

import os
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch
from support.example_scripts import (
    EXAMPLES,
    SHARED,
    batches,
    image_data,
    needs_shared,
    run_record,
    small_vit,
    starting_model,
    training,
)
from support.finetune_runs import TINY, figures, run

import stiefel_geo

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run of both arms and three epochs, which several tests look at."""
    out = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)
    run(out, "--epochs", 3)
    return out


def test_run_leaves_a_row_per_arm_and_epoch(finished):
    rows = figures(finished)
    assert [(row["arm"], row["epoch"]) for row in rows] == [(a, e) for a in ("stiefel", "adamw") for e in (1, 2, 3)]
    assert all(0 <= row["test_accuracy"] <= 1 and row["train_loss"] > 0 for row in rows)


def test_frames_move_and_stay_orthonormal(finished):
    for row in figures(finished):
        assert row["movement"] > 1e-4
        assert row["defect"] < 1e-5 if row["arm"] == "stiefel" else row["defect"] is None


def test_curves_are_a_picture(finished):
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arm", ["stiefel", "adamw"])
def test_weights_load_into_plain_timm_and_score_what_the_run_says(finished, arm):
    model = small_vit.small_vit(10)
    model.load_state_dict(safetensors.torch.load_file(finished / arm / "model.safetensors"), strict=True)
    images = image_data.load_images("digits", None, False)
    _, test = batches.prepare(images, model, 32, (64, 32))
    pixels, labels = zip(*(test[i] for i in range(len(test))), strict=True)
    with torch.no_grad():
        right = (model.eval()(torch.stack(pixels)).argmax(1) == torch.tensor(labels)).float().mean().item()
    assert right == pytest.approx([row for row in figures(finished) if row["arm"] == arm][-1]["test_accuracy"])


def test_closing_table_names_every_column(finished, capsys):
    run(finished, "--epochs", 3, "--resume")  # nothing left to train: prints the table again
    table = capsys.readouterr().out
    for word in ("arm", "test accuracy", "test loss", "seconds", "frames", "largest defect", "movement per step"):
        assert word in table
    assert [line.split()[0] for line in table.splitlines() if line.split()[:1] in (["stiefel"], ["adamw"])]


def test_the_run_ends_in_a_sentence_on_the_table(finished, capsys):
    run(finished, "--epochs", 3, "--resume")
    assert "of 32 test images apart, and chance alone explains" in capsys.readouterr().out


@pytest.mark.parametrize(("ours", "theirs", "said"), [
    (0.990, 0.985, "level: the arms are 5 of 1000 test images apart, and chance alone explains 10"),
    (0.900, 0.985, "adamw is ahead by 85 of 1000 test images, and chance alone explains 21"),
    (0.985, 0.900, "stiefel is ahead by 85 of 1000 test images, and chance alone explains 21"),
])  # fmt: skip
def test_the_sentence_tells_a_lead_from_chance(ours, theirs, said):
    scores = {"stiefel": ours, "adamw": theirs}
    rows = [{"arm": arm, "test_accuracy": score} for arm, end in scores.items() for score in (0.1, end)]
    assert run_record.verdict(rows, ["stiefel", "adamw"], 1000) == said


def test_one_arm_alone_is_compared_with_nothing():
    rows = [{"arm": "adamw", "test_accuracy": 0.5}]
    assert run_record.verdict(rows, ["adamw"], 10) == "adamw gets 5 of 10 test images right"


def test_resuming_a_finished_run_changes_no_figure(finished):
    before = figures(finished)
    run(finished, "--epochs", 3, "--resume")
    assert figures(finished) == before


def test_patched_start_equals_the_plain_start(tmp_path, capsys):
    run(tmp_path / "run", "--arm", "stiefel", "--epochs", 1)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("start:"))
    assert float(line.split()[-1]) < 1e-4


def test_an_arm_that_joins_later_leaves_the_first_ones_rows(finished, tmp_path):
    run(tmp_path / "run", "--arm", "stiefel", "--epochs", 3)
    run(tmp_path / "run", "--arm", "adamw", "--epochs", 3, "--resume")
    assert figures(tmp_path / "run") == figures(finished)


def test_interrupt_in_epoch_two_then_resume_equals_the_uninterrupted_run(finished, tmp_path, monkeypatch):
    steps, step = [], training.train_step

    def interrupted(*args):
        steps.append(1)
        if len(steps) == 6:  # four steps an epoch
            raise KeyboardInterrupt
        step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", interrupted)
        run(tmp_path / "run", "--epochs", 3, expect=130)
    assert len(figures(tmp_path / "run")) == 1
    run(tmp_path / "run", "--epochs", 3, "--resume")
    assert figures(tmp_path / "run") == figures(finished)


def test_kill_in_epoch_two_then_resume_equals_the_uninterrupted_run(finished, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "finetune.py"), *TINY, "--epochs", "3", "--out", str(out)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert len(figures(out)) == 1
    run(out, "--epochs", 3, "--resume")
    assert figures(out) == figures(finished)


@pytest.mark.parametrize("options", [
    ["--core", "freeze"], ["--core", "identity"], ["--amp", "bf16"], ["--compile"], ["--img-size", "40"],
    ["--weight-decay", "0"], ["--warmup-epochs", "0"],
], ids=" ".join)  # fmt: skip
def test_every_option_runs(tmp_path, options, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend="eager"))  # without a C++ compiler
    run(tmp_path / "run", "--arm", "stiefel", "--epochs", 1, *options)
    assert figures(tmp_path / "run")[0]["defect"] < 1e-5


def test_a_timm_model_starts_from_a_file(tmp_path):
    small = ["--model", "vit_tiny_patch16_224", "--img-size", "32", "--arm", "adamw", "--epochs", "1"]
    run(tmp_path / "one", *small)
    weights = tmp_path / "one" / "adamw" / "model.safetensors"
    loaded = starting_model.starting_model("vit_tiny_patch16_224", 10, 48, weights, False)  # grid 2×2 → 3×3
    own = safetensors.torch.load_file(weights)
    assert torch.equal(loaded.state_dict()["blocks.0.attn.qkv.weight"], own["blocks.0.attn.qkv.weight"])
    assert loaded.pos_embed.shape != own["pos_embed"].shape


@needs_shared
def test_a_real_pretrained_vit_starts_patched_as_it_is_plain():
    weights = SHARED / "pretrained" / "vit_small_patch14_dinov2.fp16.safetensors"
    model = starting_model.starting_model("vit_small_patch14_dinov2.lvd142m", 10, 70, weights, False).eval()
    images = torch.randn(2, 3, 70, 70)
    with torch.no_grad():
        plain = model(images)
        stiefel_geo.patch(model)
        assert starting_model.largest_gap(plain, model(images)) < 1e-4


@needs_shared
@pytest.mark.slow
def test_both_arms_fine_tune_a_real_pretrained_vit_alike(tmp_path):
    options = ["--data", SHARED / "data" / "cifar10-jpeg", "--model", "vit_small_patch14_dinov2.lvd142m",
               "--checkpoint", SHARED / "pretrained" / "vit_small_patch14_dinov2.fp16.safetensors",
               "--img-size", 70, "--limit-train", 1024, "--limit-test", 1000, "--epochs", 3, "--batch-size", 32,
               "--lr", 5e-5]  # fmt: skip
    run(tmp_path / "run", *options)
    last = {row["arm"]: row for row in figures(tmp_path / "run") if row["epoch"] == 3}
    assert min(row["test_accuracy"] for row in last.values()) >= 0.60
    assert last["stiefel"]["test_accuracy"] >= last["adamw"]["test_accuracy"] - 0.02
    assert last["stiefel"]["defect"] < 1e-5
