"""examples/finetune.py: what a run leaves, that it goes on after any end, and what it refuses."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch
from example_scripts import EXAMPLES, SHARED, finetune, image_data, needs_shared, small_vit, starting_model, training
from image_folders import write_images, write_tar

import stiefel_geo

TINY = ["--limit-train", "64", "--limit-test", "32", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(out, *more, expect=0):
    assert finetune.main([*TINY, "--out", str(out), *map(str, more)]) == expect


def figures(out):
    """The rows of metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]


def digest(folder):
    """Name and content of every file below."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


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
    _, test = image_data.prepare(images, model, 32, (64, 32))
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


def test_batches_follow_from_seed_and_epoch_alone():
    images = image_data.load_images("digits", None, False)
    train, _ = image_data.prepare(images, small_vit.small_vit(10), 32, (64, 32))

    def batches(seed, epoch):
        return torch.cat([pixels for pixels, _ in image_data.shuffled(train, 16, seed, epoch, 0)])

    first = batches(0, 1)
    assert torch.equal(first, batches(0, 1))
    assert not torch.equal(first, batches(0, 2))
    assert not torch.equal(first, batches(1, 1))


@pytest.mark.parametrize("options", [
    ["--core", "freeze"], ["--core", "identity"], ["--amp", "bf16"], ["--compile"], ["--img-size", "40"],
    ["--weight-decay", "0"], ["--warmup-epochs", "0"],
], ids=" ".join)  # fmt: skip
def test_every_option_runs(tmp_path, options, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend="eager"))  # without a C++ compiler
    run(tmp_path / "run", "--arm", "stiefel", "--epochs", 1, *options)
    assert figures(tmp_path / "run")[0]["defect"] < 1e-5


# timm's tar reader leaves its file to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_folders_and_tars_of_images_are_read(tmp_path):
    write_images(tmp_path / "data" / "train", ("cat", "dog", "owl"), 12)
    write_tar(tmp_path / "data" / "val.tar", ("cat", "dog", "owl"), 4)
    run(tmp_path / "run", "--data", tmp_path / "data", "--arm", "stiefel", "--epochs", 1)
    weights = safetensors.torch.load_file(tmp_path / "run" / "stiefel" / "model.safetensors")
    assert weights["head.weight"].shape == (3, 128)


def test_a_timm_model_starts_from_a_file(tmp_path):
    small = ["--model", "vit_tiny_patch16_224", "--img-size", "32", "--arm", "adamw", "--epochs", "1"]
    run(tmp_path / "one", *small)
    weights = tmp_path / "one" / "adamw" / "model.safetensors"
    loaded = starting_model.starting_model("vit_tiny_patch16_224", 10, 48, weights, False)  # grid 2×2 → 3×3
    own = safetensors.torch.load_file(weights)
    assert torch.equal(loaded.state_dict()["blocks.0.attn.qkv.weight"], own["blocks.0.attn.qkv.weight"])
    assert loaded.pos_embed.shape != own["pos_embed"].shape


class Payload:
    """Unpickled without care it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def _classes_differ(tmp_path, finished):
    write_images(tmp_path / "data" / "train", ("cat", "dog"), 2)
    write_images(tmp_path / "data" / "test", ("cat", "owl"), 2)
    return ["--data", tmp_path / "data"]


def _no_test_split(tmp_path, finished):
    write_images(tmp_path / "data" / "train", ("cat", "dog"), 2)
    return ["--data", tmp_path / "data"]


def _other_shapes(tmp_path, finished):
    safetensors.torch.save_file(small_vit.small_vit(10, embed_dim=64).state_dict(), tmp_path / "w.safetensors")
    return ["--checkpoint", tmp_path / "w.safetensors"]


def _fewer_blocks(tmp_path, finished):
    safetensors.torch.save_file(small_vit.small_vit(10, depth=4).state_dict(), tmp_path / "w.safetensors")
    return ["--checkpoint", tmp_path / "w.safetensors"]


def _truncated_weights(tmp_path, finished):
    (tmp_path / "w.safetensors").write_bytes((finished / "adamw" / "model.safetensors").read_bytes()[:9999])
    return ["--checkpoint", tmp_path / "w.safetensors"]


def _hostile_weights(tmp_path, finished):
    torch.save({"state_dict": Payload(str(tmp_path / "ran"))}, tmp_path / "w.pth")
    return ["--checkpoint", tmp_path / "w.pth"]


def _run_with(tmp_path, change):
    folder = tmp_path / "run" / "stiefel"
    folder.mkdir(parents=True)
    change(folder / "checkpoint.pt")
    return ["--resume", "--epochs", 3]


def _truncated_state(tmp_path, finished):
    content = (finished / "stiefel" / "checkpoint.pt").read_bytes()
    return _run_with(tmp_path, lambda path: path.write_bytes(content[: len(content) // 2]))


def _flipped_state(tmp_path, finished):
    content = bytearray((finished / "stiefel" / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1
    return _run_with(tmp_path, lambda path: path.write_bytes(content))


def _foreign_state(tmp_path, finished):
    return _run_with(tmp_path, lambda path: torch.save([1, 2], path))


def _hostile_state(tmp_path, finished):
    return _run_with(tmp_path, lambda path: torch.save({"options": Payload(str(tmp_path / "ran"))}, path))


def _other_options(tmp_path, finished):
    content = (finished / "stiefel" / "checkpoint.pt").read_bytes()
    return [*_run_with(tmp_path, lambda path: path.write_bytes(content)), "--lr", "2e-3"]


def _existing_run(tmp_path, finished):
    return [o for o in _run_with(tmp_path, lambda path: path.write_bytes(b"old")) if o != "--resume"]


BAD_INPUT = [
    (lambda *_: ["--model", "vit_smal_patch16_224"], "vit_small_patch16_224"),
    (lambda *_: ["--model", "resnet10t", "--arm", "stiefel"], "resnet10t"),
    (lambda *_: ["--data", "/no/such/folder"], "/no/such/folder"),
    (lambda *_: ["--data", "cifar10"], "--root"),
    (lambda *_: ["--data", "cifar10", "--root", "/no/such/folder"], "--download"),
    (lambda *_: ["--img-size", "30"], "patch size"),
    (lambda *_: ["--checkpoint", "/no/such/file"], "/no/such/file"),
    (lambda *_: ["--resume"], "without --resume"),
    (lambda *_: ["--weight-decay", "-1"], "--weight-decay"),
    (lambda *_: ["--warmup-epochs", "9"], "--warmup-epochs"),
    (lambda *_: ["--pretrained", "--checkpoint", "x"], "drop one"),
    (_classes_differ, "dog, owl"),
    (_no_test_split, "test or val"),
    (_other_shapes, "(1, 64, 64)"),
    (_fewer_blocks, "blocks.4"),
    (_truncated_weights, "w.safetensors"),
    (_hostile_weights, "w.pth"),
    (_truncated_state, "checkpoint.pt"),
    (_flipped_state, "damaged"),
    (_foreign_state, "checkpoint.pt"),
    (_hostile_state, "checkpoint.pt"),
    (_other_options, "--lr was 0.001, now 0.002"),
    (_existing_run, "add --resume"),
]


@pytest.mark.parametrize(("prepare", "named"), BAD_INPUT, ids=[named for _, named in BAD_INPUT])
def test_bad_input_ends_in_one_line_and_changes_nothing(tmp_path, finished, capsys, prepare, named):
    options = prepare(tmp_path, finished)
    before = digest(tmp_path)
    run(tmp_path / "run", *options, expect=2)
    error = capsys.readouterr().err.strip()
    assert error.startswith("finetune: ")
    assert len(error.splitlines()) == 1
    assert named in error
    assert digest(tmp_path) == before


def test_an_image_that_cannot_be_decoded_is_named(tmp_path, capsys):
    write_images(tmp_path / "data" / "train", ("cat", "dog"), 8)
    write_images(tmp_path / "data" / "test", ("cat", "dog"), 2)
    (tmp_path / "data" / "train" / "dog" / "003.png").write_bytes(b"no picture")
    run(tmp_path / "run", "--data", tmp_path / "data", "--epochs", 1, expect=2)
    assert "dog/003.png" in capsys.readouterr().err


@pytest.mark.parametrize("options", [
    ["--epochs", "0"], ["--lr", "-1"], ["--lr", "nan"], ["--limit-train", "0"], ["--arm", "sgd"],
], ids=" ".join)  # fmt: skip
def test_impossible_option_values_are_refused_by_name(tmp_path, options, capsys):
    with pytest.raises(SystemExit) as stop:
        finetune.main([*options, "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_unwritable_out_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("a file where the folder should be")
    run(tmp_path / "file" / "run", expect=2)
    assert str(tmp_path / "file") in capsys.readouterr().err


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
