"""examples/experiments/patches.py: what makes a pair a pair, and that the stages are made once and in order."""

import pytest
import torch
from support.evidence_scripts import frame_steps, harness, patch_stages, patch_training, patch_transformer, patches

TINY = ["--side", "16", "--batch-size", "16", "--width", "16", "--depth", "1", "--heads", "2", "--no-bf16"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The folder of a finished --smoke."""
    folder = tmp_path_factory.mktemp("smoke")
    assert patches.main(["--smoke", "--out", str(folder / "runs.jsonl"), "--work", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def pixels(smoke):
    return patches.load_pixels(patches.parser().parse_args(["--work", str(smoke)]))


def config(arm="scale_free", **changes):
    args = patches.parser().parse_args(TINY)
    return {**patch_stages.one(patch_stages.base(args), arm, 1e-3, 1, 0, 48), "steps": 16, **changes}


def test_smoke_runs_every_arm_and_a_second_call_adds_nothing(smoke):
    out = smoke / "runs.jsonl"
    records = harness.read_records(out)
    assert {record["config"]["arm"] for record in records} == set(frame_steps.INSTALLED)
    before = out.read_bytes()
    patches.main(["--smoke", "--out", str(out), "--work", str(smoke)])
    assert out.read_bytes() == before


def test_frames_stay_orthonormal_in_every_arm_on_the_manifold(smoke):
    defects = {r["config"]["arm"]: r["defect"] for r in harness.read_records(smoke / "runs.jsonl")}
    assert max(defects[arm] for arm in defects if arm in frame_steps.ON_MANIFOLD) < 1e-5 < defects["adamw"]


def test_tuning_runs_see_validation_images_alone_and_paired_runs_test_images_alone(smoke):
    for record in harness.read_records(smoke / "runs.jsonl"):
        tunes = record["config"]["seed"] >= patch_training.FIRST_GRID_SEED
        assert ("val_accuracy" in record, "test_accuracy" in record) == (tunes, not tunes)


def test_arms_of_a_pair_start_from_the_same_model():
    models = {arm: patch_training.build(config(arm), "cpu")[0] for arm in frame_steps.INSTALLED}
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


def tuned(arm, lr, k, accuracy, seed=patch_training.FIRST_GRID_SEED, images=4000):
    run = patch_stages.one({"batch": 64, "width": 64}, arm, lr, k, seed, images)
    return {"config": run, "val_accuracy": accuracy}


def test_learning_rates_are_chosen_on_validation_images_of_the_tuning_seed():
    common = {"batch": 64, "width": 64}
    found = [tuned("adamw", 1e-3, 1, 0.4), tuned("adamw", 1e-3, 3, 0.5), tuned("adamw", 3e-3, 1, 0.6),
             tuned("adamw", 3e-3, 3, 0.9, seed=0), tuned("scale_free", 3e-3, 10, 0.9)]  # fmt: skip
    assert patch_stages.best(found, common, 4000, "adamw") == (3e-3, 1)
    assert patch_stages.best(found, common, 16_000, "adamw") == (3e-3, 1)  # nothing tuned there: the size below
    more = [*found, tuned("adamw", 1e-3, 30, 0.1, images=16_000)]
    assert patch_stages.best(more, common, 16_000, "adamw") == (1e-3, 30)
    assert patch_stages.best(found, {**common, "width": 32}, 4000, "adamw") is None
    with pytest.raises(SystemExit, match="must be tuned before"):
        patch_stages.chosen(found, common, 4000, "muon")


def test_stages_hold_the_pairs_that_the_report_needs():
    common = {"batch": 64}
    arms = ("frozen", *patch_stages.TUNED)
    found = [tuned(arm, 3e-3, 3 if arm == "scale_free" else 1, 0.5, images=n) for arm in arms for n in (4000, 16_000)]
    runs = {name: list(stage(common, found)) for name, stage in patch_stages.STAGES.items()}
    cells = [(run["arm"], run["k"]) for run in runs["all_pairs"]]
    assert {cell: cells.count(cell) for cell in cells} == {
        ("scale_free", 3): 12, ("adamw", 3): 12, ("adamw", 1): 12, ("frozen", 1): 5
    }  # fmt: skip
    assert {run["arm"] for run in runs["arms"]} == set(frame_steps.ARMS) - {"adamw", "scale_free", "frozen"}
    for name, planned in runs.items():
        tunes = [run["seed"] >= patch_training.FIRST_GRID_SEED for run in planned]
        assert all(tunes) if name in ("screen", "tune", "tune_many") else not any(tunes)
        assert all(run["steps"] == 8 * run["images"] // 64 for run in planned)


def test_fixed_positions_are_not_trained_and_differ_from_patch_to_patch():
    position = patch_transformer.positions("sin-cos", 4, 16)
    assert not position.requires_grad
    assert position.shape == (1, 16, 16)
    assert len(torch.unique(position[0], dim=0)) == 16


@pytest.mark.slow
def test_compiled_bfloat16_products_learn_what_float32_learns(pixels):
    plain, fast = (patch_training.run(config(images=1000, steps=200, lr=2e-2, bf16=b), pixels, "cpu") for b in (0, 1))
    assert fast["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.05)


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
    attention = patch_transformer.HeadAttention(8, 2, 4)
    model = torch.nn.Sequential(attention)
    even = {"largest": 1, "smallest": 1, "product_rank": 4}
    assert patch_transformer.spectrum(model) == pytest.approx(even, abs=1e-4)
    with torch.no_grad():
        attention.query[..., 2:] *= 1e-4
    assert patch_transformer.spectrum(model)["product_rank"] == pytest.approx(2, abs=0.01)
