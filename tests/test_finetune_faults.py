"""examples/finetune.py when the machine fails it: kills, a full disk, a read-only folder, a dying worker."""

import os
import random
import re
import shutil
import signal
from typing import Any

import pytest
import torch
from support.example_scripts import atomic_files, batches, finetune
from support.finetune_runs import digest, figures, one_line, run
from support.image_folders import write_images
from support.kills import FORK, killed_after, seconds_of

pytestmark = [pytest.mark.forks, pytest.mark.usefixtures("one_thread")]

KILLS = int(os.environ.get("KILLS", "30"))
OPTIONS = ("--arm", "stiefel", "--epochs", 3)


def in_child(out, *options):
    """finetune.main in a forked process."""
    process = FORK.Process(target=run, args=(out, *options))
    process.start()
    return process


@pytest.mark.slow
def test_every_one_of_30_kills_resumes_to_the_uninterrupted_figures(tmp_path):
    seconds = seconds_of(in_child(tmp_path / "whole", *OPTIONS))
    whole = figures(tmp_path / "whole")
    rng = random.Random(0)
    landed: list[int | None] = []
    while len(landed) < KILLS:
        out = tmp_path / f"killed{len(landed)}"
        if not killed_after(in_child(out, *OPTIONS), rng.uniform(0.02, 0.98) * seconds):
            shutil.rmtree(out)
            continue
        checkpoint = out / "stiefel" / "checkpoint.pt"
        landed.append(len(atomic_files.load_state(checkpoint)["rows"]) if checkpoint.exists() else None)
        run(out, *OPTIONS, *(["--resume"] if checkpoint.exists() else []))
        assert figures(out) == whole, f"kill {len(landed)}, epochs done: {landed[-1]}"
    print(f"{KILLS} of {KILLS} resumed; epochs done at the kill: {landed}")
    assert len(set(landed)) > 2  # they landed in different places


def limited_disk(out, limit, *options):
    """The same with files that cannot grow beyond `limit` bytes: the kernel's answer is that of a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os._exit(finetune.main(["--limit-train", "64", "--limit-test", "32", "--out", str(out), *map(str, options)]))


def test_full_disk_ends_in_one_line_and_leaves_the_old_checkpoint_whole(tmp_path, capfd):
    out = tmp_path / "run"
    run(out, "--arm", "stiefel", "--epochs", 2)
    checkpoint = out / "stiefel" / "checkpoint.pt"
    state = atomic_files.load_state(checkpoint)
    for after in (checkpoint.stat().st_size - 1, 1000):
        other = tmp_path / f"limited{after}"
        process = FORK.Process(target=limited_disk, args=(other, after, "--arm", "stiefel", "--epochs", 2))
        process.start()
        process.join()
        assert process.exitcode == 2
        errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("finetune:")]
        assert len(errors) == 1
        assert "--out writable" in errors[0]
        assert not list(other.rglob("*.part"))
    assert atomic_files.load_state(checkpoint)["rows"] == state["rows"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    atomic_files.save_state(path, {"x": torch.ones(3)})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "fill", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_files.save_state(path, {"x": torch.zeros(3)})
    assert torch.equal(atomic_files.load_state(path)["x"], torch.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_read_only_folder_is_named(tmp_path, capsys):
    tmp_path.chmod(0o500)
    run(tmp_path / "run", "--epochs", 1, expect=2)
    assert str(tmp_path / "run") in capsys.readouterr().err


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_no_flipped_bit_of_a_checkpoint_is_read_over(tmp_path, part):
    path = tmp_path / "state.pt"
    atomic_files.save_state(path, {"x": torch.arange(999.0), "rows": [1, 2, 3]})
    content = path.read_bytes()
    rng = random.Random(part)
    for _ in range(25):
        damaged = bytearray(content)
        at = rng.randrange(len(content))
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            state = atomic_files.load_state(path)
        except Exception:  # a clear end, whatever its kind
            continue
        assert torch.equal(state["x"], torch.arange(999.0)), at  # padding and the archive's own names carry no value
        assert state["rows"] == [1, 2, 3]


class DyingImages(torch.utils.data.Dataset[Any]):
    """A data set whose worker process is killed, as the kernel does when memory runs out."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[i]


def test_dying_worker_ends_in_one_line_and_the_run_goes_on_after_it(tmp_path, monkeypatch, capsys):
    write_images(tmp_path / "data" / "train", ("cat", "dog"), 16)
    write_images(tmp_path / "data" / "test", ("cat", "dog"), 4)
    options = ("--data", tmp_path / "data", "--arm", "stiefel", "--epochs", 2, "--workers", 1)
    usual = batches.shuffled

    def dying_in_epoch_two(images, size, seed, epoch, options):
        return usual(DyingImages(images) if epoch else images, size, seed, epoch, options)

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "shuffled", dying_in_epoch_two)
        run(tmp_path / "run", *options, expect=1)
    error = one_line(capsys.readouterr().err)
    assert re.search(r"worker \(pid \d+\) is killed by signal: Killed", error)
    assert "--resume" in error
    assert "fewer --workers" in error
    assert len(atomic_files.load_state(tmp_path / "run" / "stiefel" / "checkpoint.pt")["rows"]) == 1
    run(tmp_path / "run", *options, "--resume")
    run(tmp_path / "whole", *options)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def test_other_errors_of_the_machine_keep_their_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(finetune, "train_epoch", broken)
    with pytest.raises(RuntimeError, match="launch failure"):
        run(tmp_path / "run", "--epochs", 1)


def test_image_that_a_worker_cannot_decode_is_named_in_one_line(tmp_path, capsys):
    write_images(tmp_path / "data" / "train", ("cat", "dog"), 16)
    write_images(tmp_path / "data" / "test", ("cat", "dog"), 4)
    (tmp_path / "data" / "train" / "dog" / "003.png").write_bytes(b"no picture")
    run(tmp_path / "run", "--data", tmp_path / "data", "--epochs", 1, "--workers", 1, expect=2)
    error = one_line(capsys.readouterr().err)
    assert error.startswith("finetune: every image must be readable")
    assert "dog/003.png" in error


def other_weights(state):
    state["model"]["head.weight"] = torch.zeros(3, 3)


def other_moments(state):
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)


def other_arm(state):
    state["rows"] = [{**row, "arm": "stiefel"} for row in state["rows"]]


@pytest.mark.parametrize("spoil", [other_weights, other_moments, other_arm])
def test_checkpoint_of_the_second_arm_that_does_not_fit_is_refused_before_the_first_trains(
    tmp_path, monkeypatch, capsys, spoil
):
    run(tmp_path / "run", "--epochs", 1)
    path = tmp_path / "run" / "adamw" / "checkpoint.pt"
    state = atomic_files.load_state(path)
    spoil(state)
    atomic_files.save_state(path, state)
    (tmp_path / "run" / "stiefel" / "checkpoint.pt").unlink()  # so the first arm would begin anew
    capsys.readouterr()
    monkeypatch.setattr(finetune, "train_epoch", lambda *_: pytest.fail("trained"))
    before = digest(tmp_path)
    run(tmp_path / "run", "--epochs", 1, "--resume", expect=2)
    assert f"{path} is not" in one_line(capsys.readouterr().err)
    assert digest(tmp_path) == before
