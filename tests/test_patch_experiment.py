"""examples/cifar10_patches.py: what makes a pair a pair, and that the stages are made once and in order."""

import pytest
import torch
from evidence_scripts import cifar10_patches, frame_steps, harness, patch_stages, patch_training, patch_transformer

TINY = ["--images", "48", "--steps", "16", "--batch-size", "16", "--width", "16", "--depth", "1", "--heads", "2"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The folder of a finished --smoke."""
    folder = tmp_path_factory.mktemp("smoke")
    assert cifar10_patches.main(["--smoke", "--out", str(folder / "runs.jsonl"), "--work", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def pixels(smoke):
    return cifar10_patches.load_pixels(cifar10_patches.parser().parse_args(["--work", str(smoke)]))


def config(arm="scale_free", **changes):
    args = cifar10_patches.parser().parse_args(TINY)
    return {**patch_stages.base(args), "arm": arm, "seed": 0, "lr": 1e-3, **changes}


def test_smoke_runs_every_arm_and_a_second_call_adds_nothing(smoke):
    out = smoke / "runs.jsonl"
    records = harness.read_records(out)
    assert {record["config"]["arm"] for record in records} == set(frame_steps.ARMS)
    before = out.read_bytes()
    cifar10_patches.main(["--smoke", "--out", str(out), "--work", str(smoke)])
    assert out.read_bytes() == before


def test_frames_stay_orthonormal_in_every_arm_on_the_manifold(smoke):
    defects = {r["config"]["arm"]: r["defect"] for r in harness.read_records(smoke / "runs.jsonl")}
    assert max(defects[arm] for arm in frame_steps.ON_MANIFOLD) < 1e-5 < defects["adamw"]


def test_arms_of_a_pair_start_from_the_same_model():
    models = {arm: patch_training.build(config(arm), "cpu")[0] for arm in frame_steps.ARMS}
    start = models["adamw"].state_dict()
    for arm, model in models.items():
        same = {name for name, value in model.state_dict().items() if torch.equal(value, start[name])}
        redrawn = {"blocks.0.attention.query", "blocks.0.attention.key"}
        assert set(start) - same == (redrawn if arm == "adamw_default_init" else set())


def test_arms_of_a_pair_see_the_same_batches_and_other_seeds_see_others(pixels):
    def first(arm, seed):
        data = patch_training.splits(pixels, config(arm, seed=seed), "cpu")[0]
        batches = patch_training.batches(data, config(arm, seed=seed))
        return torch.cat([next(batches)[0] for _ in range(5)])

    assert torch.equal(first("adamw", 0), first("scale_free", 0))
    assert not torch.equal(first("adamw", 0), first("adamw", 1))


def test_training_validation_and_test_images_are_disjoint(pixels):
    marked = {**pixels, "train": torch.arange(len(pixels["train"])).view(-1, 1, 1, 1).expand(-1, 3, 16, 16)}
    marked["test"] = torch.full_like(pixels["test"], 255).long() * 100
    parts = patch_training.splits(marked, config(images=10**6), "cpu")
    train, validation, test = (set(part.images[:, 0, 0, 0].tolist()) for part in parts)
    assert len(train) + len(validation) == len(train | validation) == len(pixels["train"])
    assert not (train | validation) & test


def test_smaller_training_sets_are_part_of_larger_ones(pixels):
    small, large = (patch_training.splits(pixels, config(images=n), "cpu")[0].images for n in (20, 60))
    assert torch.equal(small, large[:20])


def test_a_run_learns(pixels):
    record = patch_training.run(config(images=1000, steps=200, lr=2e-2), pixels, "cpu")
    assert record["rows"][-1]["train_loss"] < 0.7 * record["rows"][0]["train_loss"]
    assert record["test_accuracy"] > 0.4  # one in ten by chance


def test_a_run_is_the_same_again(pixels):
    once, again = (patch_training.run(config(), pixels, "cpu") for _ in range(2))
    assert once == again


def test_learning_rate_is_chosen_on_validation_images_of_the_grids_seeds():
    common = {"images": 5}
    found = [(1e-3, 100, 0.4), (3e-3, 100, 0.5), (1e-2, 100, 0.3), (1e-2, 0, 0.9), (1e-3, 101, 0.7)]
    records = [
        {"config": {**common, "arm": "adamw", "lr": lr, "seed": seed}, "val_accuracy": val, "test_accuracy": 1 - val}
        for lr, seed, val in found
    ]
    assert patch_stages.chosen_lr(records, common) == {"adamw": 1e-3}
    assert patch_stages.chosen_lr(records, {"images": 6}) == {}


def test_stages_hold_what_the_report_needs():
    common = {"images": 4000, "decay": 0.05, "steps": 300}
    lr = dict.fromkeys(frame_steps.ARMS, 1e-3)
    arms = [run["arm"] for run in patch_stages.arms_stage(common, lr)]
    counts = {arm: arms.count(arm) for arm in arms}
    assert counts == {**dict.fromkeys(frame_steps.ARMS, 5), "adamw": 12, "scale_free": 12}
    cells = [(run["decay"], run["images"], run["arm"]) for run in patch_stages.sweep_stage(common, lr)]
    assert set(map(cells.count, cells)) == {3}
    assert {decay for decay, _, _ in cells} == {0.0, 0.05, 0.3, 1.0}


def test_gain_scales_the_logits_alone():
    attention = patch_transformer.HeadAttention(8, 2, 4)
    x = torch.randn(3, 5, 8)
    q, k = attention.queries_and_keys(x)
    torch.testing.assert_close(q[:, 1], x @ attention.query[1])
    torch.testing.assert_close(k[:, 0], x @ attention.key[0])
    with torch.no_grad():
        attention.gain[1] = 1.0
    louder, same = attention.queries_and_keys(x)
    torch.testing.assert_close(louder[:, 1], torch.e * q[:, 1])
    assert torch.equal(louder[:, 0], q[:, 0])
    assert torch.equal(same, k)


def test_rank_of_the_product_counts_its_equal_directions():
    model = torch.nn.Sequential(patch_transformer.HeadAttention(8, 2, 4))
    even = {"largest": 1, "smallest": 1, "product_rank": 4}
    assert patch_transformer.spectrum(model) == pytest.approx(even, abs=1e-4)
    with torch.no_grad():
        model[0].query[..., 2:] *= 1e-4
    assert patch_transformer.spectrum(model)["product_rank"] == pytest.approx(2, abs=0.01)
