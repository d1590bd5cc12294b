"""What finetune.py leaves for the eye: the diagnostics of every epoch, in metrics.jsonl, TensorBoard and a picture."""

import json

import pytest
from support.example_scripts import finetune, run_record

ROW = {"arm": "stiefel", "epoch": 1, "train_loss": 1.0, "test_accuracy": 0.5, "defect": 1e-6, "movement": 1e-2}


def test_tensorboard_holds_the_scalars_of_metrics_jsonl(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is an optional extra: pip install stiefel-geo[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert finetune.main(["--smoke", "--arm", "stiefel", "--tensorboard", "--out", str(out)]) == 0
    written = EventAccumulator(str(out / "tensorboard" / "stiefel")).Reload()
    for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        for key in ("defect", "movement", "spectrum_low", "spectrum_median", "spectrum_high", "test_accuracy"):
            values = {event.step: event.value for event in written.Scalars(key)}
            assert values[row["epoch"]] == pytest.approx(row[key], rel=1e-6)


def test_the_spectrum_is_ordered_and_positive(tmp_path):
    out = tmp_path / "run"
    assert finetune.main(["--smoke", "--arm", "adamw", "--epochs", "1", "--out", str(out)]) == 0
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < row["spectrum_low"] < row["spectrum_median"] < row["spectrum_high"]


def test_the_picture_takes_rows(tmp_path):
    run_record.draw_curves([ROW, ROW | {"epoch": 2}], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
