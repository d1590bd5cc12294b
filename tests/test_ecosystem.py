"""The three lines in Lightning, accelerate and Hugging Face transformers, each run against the real package."""

import csv
import importlib
from typing import Any

import pytest
import torch
from support import example_scripts  # noqa: F401  # puts examples/ on the path
from support.tiny_vit import batch, largest_defect
from torch import nn

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam
from stiefel_geo.attention.patching import cores

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PIXELS = {"image_size": 16, "patch_size": 8}


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is an optional extra: pip install stiefel-geo[{package}]")


def last_defect(text: str) -> float:
    """The number after "largest defect" in the last line that has it."""
    return float(text.rpartition("largest defect ")[2].split()[0].rstrip(";"))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress bars, no network."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


# Warnings that Lightning raises at itself, at its own dependencies, or about the tiny run.
LIGHTNING = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:Checkpoint directory .* exists",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


@LIGHTNING
def test_lightning_trains_two_epochs_on_the_manifold_and_logs_it(tmp_path, capsys):
    needs("lightning")
    assert importlib.import_module("train_lightning").main(["--smoke", "--out", str(tmp_path)]) == 0
    assert last_defect(capsys.readouterr().out) < 1e-5
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["frames/defect"]]
    assert len(rows) >= 4
    assert all(0 < float(row["frames/defect"]) < 1e-5 and float(row["frames/movement"]) > 1e-3 for row in rows)


def test_the_callback_refuses_to_look_every_zero_batches():
    needs("lightning")
    callback = importlib.import_module("stiefel_geo.integrations.lightning_callback").FrameDiagnostics
    with pytest.raises(ValueError, match="every ≥ 1; found 0"):
        callback(every=0)


def test_accelerate_trains_two_epochs_on_the_manifold(capsys):
    needs("accelerate")
    assert importlib.import_module("train_accelerate").main(["--smoke"]) == 0
    assert last_defect(capsys.readouterr().out) < 1e-5


def hugging_face_models() -> dict[str, nn.Module]:
    transformers = needs("transformers")
    torch.manual_seed(0)
    configs = {
        "ViTModel": transformers.ViTConfig(**SIZES, **PIXELS),
        "Dinov2Model": transformers.Dinov2Config(**SIZES, **PIXELS),
        "CLIPVisionModel": transformers.CLIPVisionConfig(**SIZES, **PIXELS),
    }
    return {name: getattr(transformers, name)(config).eval() for name, config in configs.items()}


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "CLIPVisionModel"])
def test_patch_keeps_the_function_of_hugging_face_models(name):
    model = hugging_face_models()[name]
    images, _ = batch(0)
    before = model(pixel_values=images).last_hidden_state
    report = stiefel_geo.patch(model)
    assert [(entry.frames, entry.d, entry.r) for entry in report.patched] == [(4, 32, 16)] * 2
    torch.testing.assert_close(model(pixel_values=images).last_hidden_state, before, atol=1e-5, rtol=0)


def test_unpatch_gives_a_hugging_face_model_its_own_keys_back():
    model = hugging_face_models()["ViTModel"]
    keys = list(model.state_dict())
    stiefel_geo.patch(model)
    assert list(stiefel_geo.plain_state_dict(model)) == keys
    stiefel_geo.unpatch(model)
    assert list(model.state_dict()) == keys


class Pixels(torch.utils.data.Dataset[dict[str, Any]]):
    """Random images as transformers' Trainer takes them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        images, labels = batch(index, size=1)
        return {"pixel_values": images[0], "labels": labels[0]}


def test_transformers_trainer_trains_two_epochs_on_the_manifold(quiet, tmp_path):
    transformers = needs("transformers")
    needs("accelerate")
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **PIXELS, num_labels=10))
    stiefel_geo.patch(model)
    optimizer = ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.05), lr=1e-3)
    before = [core.detach().clone() for _, core in cores(model)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=8, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    result = transformers.Trainer(model, arguments, train_dataset=Pixels(), optimizers=(optimizer, None)).train()
    assert result.global_step == 8
    assert largest_defect(model) < 1e-5
    assert not any(torch.equal(a, b) for a, (_, b) in zip(before, cores(model), strict=True))
