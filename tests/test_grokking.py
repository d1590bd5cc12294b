"""examples/grokking.py: the looked-up model is the transformer, and a stopped run goes on where it was."""

import itertools
import math

import pytest
import torch
from support.evidence_scripts import grokking, harness, modular_transformer
from torch.nn import functional as F

SMALL = ["--p", "7", "--width", "16", "--heads", "2", "--seeds", "1", "--epochs", "20"]


@pytest.fixture(autouse=True)
def row_every_ten_epochs(monkeypatch):
    monkeypatch.setattr(grokking, "ROW_EVERY", 10)
    monkeypatch.setattr(grokking, "SAVE_EVERY", 10)


def config(arm="scale_free"):
    return next(c for c in grokking.grid(grokking.parser().parse_args(SMALL)) if c["arm"] == arm)


def on_sequences(model, pairs):
    """The same transformer, literally: attention over the three tokens (a, b, =), read at the last."""
    tokens = F.pad(pairs, (0, 1), value=model.p)
    x = model.token[tokens] + model.position[:, 0]
    x = x + model.attention(model.norm1(x))
    z = x[:, -1]
    return model.head(model.norm(z + model.mlp(model.norm2(z))))


def test_looked_up_model_is_the_transformer_on_sequences():
    torch.manual_seed(0)
    model = modular_transformer.ModularTransformer(7, 16, 2)
    with torch.no_grad():
        model.attention.gain.normal_()
    pairs = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    torch.testing.assert_close(model(pairs), on_sequences(model, pairs))


def test_every_equation_is_in_one_split():
    train, val = grokking.equations(config())
    assert len(train) == round(0.5 * 49)
    assert {tuple(pair) for pair in torch.cat([train, val]).tolist()} == {(a, b) for a in range(7) for b in range(7)}
    assert len(train) + len(val) == 49


@pytest.mark.parametrize("arm", grokking.GROKKING_ARMS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, arm):
    whole = grokking.run(config(arm), tmp_path / "whole", math.inf)
    with pytest.raises(grokking.OutOfTime):
        grokking.run(config(arm), tmp_path / "parts", -math.inf)
    assert grokking.run(config(arm), tmp_path / "parts", math.inf) == whole
    assert [row["epoch"] for row in whole["rows"]] == [10, 20]


def test_smoke_finishes_a_pair(tmp_path):
    out = tmp_path / "runs.jsonl"
    assert grokking.main(["--smoke", "--out", str(out), "--work", str(tmp_path)]) == 0
    records = harness.read_records(out)
    assert [record["config"]["arm"] for record in records] == ["adamw", "scale_free"]
    assert all(record["reached"] == 20 for record in records)
    assert records[1]["rows"][-1]["largest"] - records[1]["rows"][-1]["smallest"] < 1e-5


def test_out_of_time_leaves_what_there_is_and_the_next_call_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "runs.jsonl"
    options = [*SMALL, "--out", str(out), "--work", str(tmp_path)]
    clock = itertools.count(0.0, 61.0)
    with monkeypatch.context() as patch:
        patch.setattr(grokking.time, "monotonic", lambda: next(clock))
        grokking.main([*options, "--minutes", "1"])
    assert not out.exists()
    partial = harness.read_records(grokking.partial_file(out))
    assert [(run["reached"], run["config"]["arm"]) for run in partial] == [(10, "adamw"), (10, "scale_free")]
    grokking.main(options)
    assert [run["rows"][0] for run in harness.read_records(out)] == [run["rows"][0] for run in partial]
