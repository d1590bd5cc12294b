"""examples/small_vit/pretrain.py, and the weights that it left in the repository."""

import json

import pytest
import safetensors.torch
import torch
from support.example_scripts import SHARED, needs_shared, pretrain, small_vit
from support.image_folders import write_tar

# timm's tar reader leaves its file to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def data(tmp_path):
    classes = [f"class{i}" for i in range(10)]
    for part in ("train", "test"):
        write_tar(tmp_path / f"{part}.tar", classes, 8)
    return tmp_path


def train(data, *more):
    asset = data / "asset.safetensors"
    threads = torch.get_num_threads()
    options = ["--data", str(data), "--work", str(data / "work"), "--asset", str(asset), "--batch-size", "40"]
    assert pretrain.main([*options, *more]) == 0
    torch.set_num_threads(threads)
    return safetensors.torch.load_file(asset)


def test_weights_fit_the_default_model_and_the_record_names_the_command(data):
    small_vit.small_vit(10).load_state_dict(train(data, "--smoke"), strict=True)
    assert "--smoke" in (data / "asset.md").read_text()


def test_resumed_pretraining_equals_the_uninterrupted_one(data, monkeypatch, capsys):
    options = ("--epochs", "2", "--full-epochs", "1")
    whole = train(data, *options)
    (data / "work" / "checkpoint.pt").unlink()
    step = pretrain.train_epoch

    def stopped(*args):
        if args[4] == 1:  # the epoch
            raise KeyboardInterrupt
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "train_epoch", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(data, *options)
    capsys.readouterr()
    resumed = train(data, *options)
    assert json.loads(capsys.readouterr().out.splitlines()[0])["epoch"] == 2
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_augmentation_only_shifts_and_mirrors():
    images = torch.arange(3 * 32 * 32).reshape(1, 3, 32, 32).expand(64, -1, -1, -1)
    for image in pretrain.augment(images, torch.Generator().manual_seed(0)):
        inner = image[:, 8:24, 8:24]  # never reached by the padding
        steps = inner.diff(dim=2)
        assert steps.abs().eq(1).all()
        assert inner.diff(dim=1).eq(32).all()
        assert inner.diff(dim=0).eq(32 * 32).all()


@needs_shared
def test_carried_weights_reach_their_accuracy_on_cifar10():
    model = small_vit.small_vit(10)
    model.load_state_dict(safetensors.torch.load_file(small_vit.ASSET), strict=True)
    assert small_vit.ASSET.stat().st_size < 3_000_000
    test = pretrain.decode(SHARED / "data" / "cifar10-jpeg" / "test.tar", 1000)
    assert pretrain.accuracy(model, test) >= 0.65
