"""examples/finetune.py: every bad input ends in one line and changes nothing."""

import pytest
import safetensors.torch
import torch
from support.example_scripts import finetune, small_vit
from support.finetune_runs import digest, run
from support.image_folders import write_images


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run of one arm, whose files are spoilt below."""
    out = tmp_path_factory.mktemp("finished")
    run(out, "--arm", "stiefel", "--epochs", 1)
    return out


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
    (tmp_path / "w.safetensors").write_bytes((finished / "stiefel" / "model.safetensors").read_bytes()[:9999])
    return ["--checkpoint", tmp_path / "w.safetensors"]


def _hostile_weights(tmp_path, finished):
    torch.save({"state_dict": Payload(str(tmp_path / "ran"))}, tmp_path / "w.pth")
    return ["--checkpoint", tmp_path / "w.pth"]


def _run_with(tmp_path, change):
    folder = tmp_path / "run" / "stiefel"
    folder.mkdir(parents=True)
    change(folder / "checkpoint.pt")
    return ["--resume", "--epochs", 1]


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
