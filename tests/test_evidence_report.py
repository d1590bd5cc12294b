"""examples/experiments/report.py: every figure, verdict and answer follows from the runs, on docs/results.md too."""

import copy
import re
import shutil

import numpy as np
import pytest
from support.evidence_scripts import (
    EXAMPLES,
    claims,
    evidence,
    finetune_pairs,
    harness,
    patch_evidence,
    patch_stages,
    report,
    report_sections,
)

PAGE = EXAMPLES.parent / "docs" / "results.md"
BASE = {
    "experiment": "patches", "data": "cifar10", "mirror": True, "side": 32, "patch": 4, "position": "wide",
    "gain": False, "batch": 64, "decay": 0.05, "width": 64, "depth": 2, "heads": 4, "bf16": True,
}  # fmt: skip


def record(arm, seed, accuracy, lr=3e-3, k=3, images=4000, **changes):
    config = {**patch_stages.one(BASE, arm, lr, k, seed, images), **changes}
    return {
        "config": config, "val_accuracy": accuracy, "test_accuracy": accuracy, "movement": 1e-3, "travelled": 0.1,
        "capped": 0, "defect": 1e-7, "spectrum": {"largest": 1.0, "smallest": 1.0, "product_rank": 16.0},
        "rows": [{"step": 10, "movement": 1e-3}], "seconds": 1.0,
        "versions": {"torch": "2"}, "commit": "abc", "dirty": False,
    }  # fmt: skip


def tuned(images=4000, **ks):
    """A tuning run of each arm at its k, so that it is compared there."""
    ks = {"frozen": 1, "adamw": 3, "scale_free": 3, **ks}
    return [record(arm, patch_stages.FIRST_GRID_SEED, 0.5, k=k, images=images) for arm, k in ks.items()]


def pairs(gains, **changes):
    """A pair of runs for each gain in points."""
    both = (("adamw", 0.0), ("scale_free", 1.0))
    return [record(arm, s, 0.3 + on * g / 100, **changes) for s, g in enumerate(gains) for arm, on in both]


def of(*runs):
    return patch_evidence.PatchRuns([run for some in runs for run in some])


def cell(arm, images=4000, lr=3e-3, k=3.0):
    return patch_evidence.Cell(images, arm, lr, k)


def claim(runs, words):
    return next(claim for claim in claims.patch_claims(runs) if words in claim.claim)


def test_the_headlines_figure_and_verdict_turn_with_the_runs():
    up = claim(of(tuned(), pairs([9.0, 9.5, 8.5, 9.2])), "+8.98 points over AdamW, 12")
    down = claim(of(tuned(), pairs([-9.0, -9.5, -8.5, -9.2])), "+8.98 points over AdamW, 12")
    assert (up.verdict, down.verdict) == ("reproduced", "not reproduced")
    assert up.figure.startswith("+9.05 points [+8.38, +9.72] (n = 4)")
    assert "4/4 won" in up.figure
    assert "0/4 won" in down.figure


def test_each_arm_is_compared_where_its_own_tuning_was_best():
    runs = of(tuned(adamw=1), pairs([1.0, 1.1, 1.2], k=3), pairs([5.0, 5.1, 5.2], k=1))
    theirs, same = (claim(runs, words) for words in ("over AdamW, 12", "AdamW at ours' learning rates"))
    assert theirs.configuration == "4,000 images, lr 0.003, k 3 against lr 0.003, k 1"
    assert theirs.figure.startswith("+1.10")  # AdamW has 30 % at every k
    assert same.configuration == "4,000 images, lr 0.003, k 3"


def test_runs_with_float32_products_are_a_pair_of_their_own_and_are_compared_with_bfloat16():
    low, high = pairs([1.0, 1.2, 0.8, 1.0]), pairs([9.0, 9.5, 8.5, 9.2], bf16=False)
    runs = of(tuned(), low, low, high)
    assert claim(runs, "+8.98 points over AdamW, 12").figure.startswith("+1.00 points")
    assert claim(runs, "float32 products, both as tuned").figure.startswith("+9.05 points [+8.38, +9.72] (n = 4)")
    ours, theirs = (claim(runs, f"(float32 − bfloat16, {arm})") for arm in ("scale_free", "adamw"))
    assert ours.figure.startswith("+8.05 points")
    assert (ours.verdict, theirs.verdict) == ("not reproduced", "reproduced")
    assert not [c for c in claims.patch_claims(of(tuned(), low)) if "float32" in c.claim]


def test_tuning_runs_and_other_configurations_do_not_count_as_pairs():
    runs, other = of(tuned(), pairs([1.0, 1.2, 0.8])), pairs([9.0, 9.0], depth=1)
    assert runs.differences(cell("scale_free"), cell("adamw")) == pytest.approx([1.0, 1.2, 0.8])
    more = of(tuned(), pairs([1.0, 1.2, 0.8]), other)
    assert more.differences(cell("scale_free"), cell("adamw")) == pytest.approx([1.0, 1.2, 0.8])


def test_ratio_is_the_geometric_mean():
    runs = [{**record(arm, s, 0.3), "movement": m} for arm, ms in (("adamw", (1, 4)), ("pogo", (1, 1)))
            for s, m in enumerate(ms)]  # fmt: skip
    assert of(runs).ratio(cell("adamw"), cell("pogo"), "movement").mean == pytest.approx(2.0)


def test_slope_is_the_gain_of_a_doubling_and_leaves_out_seeds_without_every_size():
    sizes = (1000, 2000, 4000)
    third = [run for i in sizes[:2] for run in pairs([0.0, 0.0, 9.0], images=i)[4:]]
    runs = of(*(pairs([i / 1000, 1 + i / 1000], images=i) for i in sizes), third)
    # gains 1, 2, 4 at log2 0, 1, 2: least squares slope 3/2.
    slopes = runs.slopes(lambda n: (cell("scale_free", n), cell("adamw", n)), sizes)
    assert slopes == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize(
    ("means", "found"),
    [
        ([40.0, 41.0, 40.5, 30.0], (1, 10)),
        ([30.0, 40.0, 38.0, 39.5], (3, 3)),  # the last is within a point, but not the one between
        ([39.0, 39.5, 40.0, 39.2], (1, 30)),
    ],
)
def test_range_of_k_is_without_gaps_and_within_a_point(means, found):
    assert patch_evidence.range_of_k({k: [m] for k, m in zip((1, 3, 10, 30), means, strict=True)}) == found


def test_screen_compares_at_each_lr_of_the_rest_and_passes_at_five_points():
    seed = patch_stages.FIRST_GRID_SEED
    runs = of(pairs([0.0, 0.0]), [
        record("frozen", seed, 0.30, lr=1e-3), record("adamw", seed, 0.35, lr=1e-3),
        record("adamw", seed, 0.33, lr=1e-3, k=9),
        record("frozen", seed, 0.30, lr=3e-3, depth=1), record("scale_free", seed, 0.349, lr=3e-3, depth=1),
    ])  # fmt: skip
    found = [(name, lr, round(trained - frozen, 6)) for name, lr, frozen, trained in patch_evidence.screen(runs)]
    assert found == [("base", 1e-3, 5.0), ("1 layer", 3e-3, 4.9)]
    assert [patch_evidence.passes(30.0, trained) for trained in (35.0, 34.9)] == [True, False]


def test_a_collapse_is_a_fall_after_learning_and_counts_once_until_learned_again():
    def run(*accuracies):
        return {"rows": [{"train_accuracy": accuracy} for accuracy in accuracies]}

    assert evidence.collapses(run(0.1, 0.5, 0.8)) == 0
    assert evidence.collapses(run(0.1, 1.0, 0.95, 1.0)) == 0
    assert evidence.collapses(run(1.0, 0.5, 0.2, 1.0, 0.3)) == 2


def test_late_share_looks_at_the_second_half_alone():
    rows = [
        {"epoch": epoch, "val_accuracy": 1.0 if epoch in (100, 900, 1000) else 0.5} for epoch in range(100, 1001, 100)
    ]
    assert evidence.held({"rows": rows, "reached": 1000}) == pytest.approx(2 / 5)


@pytest.fixture
def folder(tmp_path):
    """Runs at two values of k, and a page to write to."""
    for run in [*tuned(), *pairs([1.0, 1.2, 0.8]), *pairs([2.0, 2.2, 1.8], k=1), *pairs([0.0, 0.1, 0.2], k=10)]:
        harness.append_record(tmp_path / "patches.jsonl", run)
    (tmp_path / "results.md").write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    return tmp_path


def written(folder):
    assert report.main(["--results", str(folder), "--page", str(folder / "results.md")]) == 0
    return (folder / "results.md").read_text()


def test_report_draws_and_writes_from_the_runs_alone_between_the_markers(folder):
    text = written(folder)
    assert "+1.00 points [+0.50, +1.50] (n = 3) at 4,000 images (ahead)" in text
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(pictures) == 3
    assert all((folder / picture).stat().st_size > 1000 for picture in pictures)
    assert text.startswith(f"before\n{report.START}\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text.split()


def test_page_without_markers_is_refused_and_left_alone(folder, capsys):
    page = folder / "results.md"
    page.write_text("no markers")
    assert report.main(["--results", str(folder), "--page", str(page)]) == 2
    assert page.read_text() == "no markers"
    assert "must hold" in capsys.readouterr().err


def test_page_in_the_repository_is_what_its_runs_give():
    text = PAGE.read_text(encoding="utf-8")
    assert text == report.put_between(text, report.body(report.Evidence.of(harness.RESULTS)))


def test_pictures_of_the_page_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text(encoding="utf-8"))
    assert pictures
    assert all((PAGE.parent / picture).exists() for picture in pictures)


def test_results_hold_no_paths_of_a_machine():
    for file in harness.RESULTS.glob("*.jsonl"):
        assert not re.search(r'"(/|~|[A-Z]:\\)[^"]*"', file.read_text()), file.name


def test_a_reader_without_some_of_the_results_gets_the_rest(folder):
    shutil.copy(harness.RESULTS / "grokking.jsonl", folder)
    text = written(folder)
    assert "## Modular addition" in text
    assert "## Fine-tuning" not in text


def test_records_are_not_changed_by_the_report():
    runs = [*tuned(), *pairs([1.0, 1.2, 0.8])]
    before = copy.deepcopy(runs)
    claims.patch_claims(of(runs))
    assert runs == before


def test_phase_words_name_each_cell_once_under_its_verdict():
    words = report_sections.phase_words(
        {(1.0, 10): [1.0, 1.1, 1.2], (3.0, 20): [1.0, 1.1], (9.0, 20): [0.1, -0.1, 0.0]}
    )
    assert words == "ahead: 1 × 10; level: 9 × 20; cannot decide here: too few pairs: 3 × 20."


def finetuned(gains, lr):
    """Fine-tuning runs at a peak learning rate: a pair for each gain in points."""
    config = {"experiment": "finetune", "model": "vit", "checkpoint": None, "img_size": 56, "images": 2000,
              "data": "cifar10", "epochs": 2, "test_images": 1000, "peak_lr": lr}  # fmt: skip
    return [
        {**record(arm, s, 0.5 + on * g / 100), "config": {**config, "arm": arm, "seed": s}}
        for s, g in enumerate(gains) for arm, on in (("adamw", 0.0), ("scale_free", 1.0))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([1, 1.1, 1.2], "ahead"),
        ([1, -2, 3], "cannot decide here: interval too wide"),
        ([1, 2], "cannot decide here: too few pairs"),
    ],
)
def test_fine_tuning_is_judged_at_each_learning_rate(gains, verdict):
    rows = claims.finetune_claims([*finetuned(gains, 1e-4), *finetuned([-1, -1.1, -1.2], 1e-3)])
    assert [row.verdict for row in rows] == [verdict, "behind"]
    assert "lr 0.0001 " in rows[0].claim


def test_fine_tuning_pairs_come_from_finetune_itself(tmp_path):
    out = tmp_path / "runs.jsonl"
    assert finetune_pairs.main(["--smoke", "--out", str(out)]) == 0
    runs = harness.read_records(out)
    assert [run["config"]["arm"] for run in runs] == ["adamw", "scale_free"]
    assert [run["rows"][-1]["arm"] for run in runs] == ["adamw", "stiefel"]
    assert runs[0]["rows"][-1]["defect"] is None
    assert runs[1]["rows"][-1]["defect"] < 1e-5
    assert finetune_pairs.main(["--smoke", "--out", str(out)]) == 0
    assert harness.read_records(out) == runs  # nothing is run twice


def test_fine_tuning_pairs_that_are_missing_are_counted():
    runs = [*finetuned([1.0] * 5, 1e-4), *finetuned([1.0, 2.0], 1e-3)]
    lines = report.missing(report.Evidence(of([]), [], [], runs, [])).splitlines()
    assert lines == ["- fine-tuning, lr 0.001: 2 of 5 pairs"]


def test_stages_that_are_not_done_are_counted():
    lines = report.missing(report.Evidence(of(tuned(), pairs([1.0, 2.0])), [], [], [], [])).splitlines()
    assert "- images, stage `base_pairs`: 4 of 29 runs" in lines
    assert "- images, stage `arms`: its arms are not tuned yet" in lines


def test_pairs_of_a_screened_configuration_are_reported_by_its_name_and_apart():
    runs = of(pairs([1.0, 2.0, 3.0]), [record(arm, 0, 0.5, depth=1) for arm in ("adamw", "scale_free")])
    ((name, other),) = runs.others()
    assert name == "1 layer"
    assert other.values(cell("scale_free")) == {0: 0.5}
    assert len(runs.values(cell("scale_free"))) == 3


def test_curves_hold_every_seed_in_percent():
    curve = of(pairs([1.0, 2.0]), pairs([3.0], k=1)).curve(4000, "scale_free", 3e-3)
    assert list(curve) == [1.0, 3.0]
    assert np.allclose(curve[3.0], [31.0, 32.0])
