"""examples/report.py: every figure and verdict follows from the runs, in the README too."""

import copy
import math
import re

import pytest
from evidence_scripts import (
    EXAMPLES,
    claims,
    evidence,
    finetune_pairs,
    harness,
    paired_statistics,
    patch_stages,
    report,
    report_sections,
)

README = EXAMPLES.parent / "README.md"
MAIN = {
    "experiment": "patches", "data": "cifar10", "side": 16, "images": 4000, "steps": 300, "batch": 64, "decay": 0.05,
    "width": 64, "depth": 2, "heads": 4,
}  # fmt: skip


def record(arm, seed, accuracy, movement=1e-3, lr=1e-3, **changes):
    return {
        "config": {**MAIN, "arm": arm, "seed": seed, "lr": lr, **changes},
        "val_accuracy": accuracy, "test_accuracy": accuracy, "movement": movement, "travelled": 0.1, "capped": 0,
        "spectrum": {"largest": 1.0, "smallest": 1.0, "product_rank": 16.0},
        "rows": [{"step": 10, "movement": movement}], "seconds": 1.0,
        "versions": {"torch": "2"}, "commit": "abc", "dirty": False,
    }  # fmt: skip


def pairs(gains, **changes):
    """A pair of runs for each gain in points."""
    both = (("adamw", 0.0), ("scale_free", 1.0))
    return [record(arm, s, 0.3 + on * g / 100, **changes) for s, g in enumerate(gains) for arm, on in both]


def test_paired_statistics_of_five_differences():
    # By hand: mean 3, sd √2.5, t = 3/(√2.5/√5) = 3√2; t(0.975, 4) = 2.776445; Wilcoxon of five positives: 2/2⁵.
    result = paired_statistics.paired([1, 2, 3, 4, 5])
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert result.n == result.wins == 5
    assert result.mean == pytest.approx(3)
    assert result.sd == pytest.approx(math.sqrt(2.5))
    assert (result.low, result.high) == pytest.approx((3 - half, 3 + half), rel=1e-6)
    assert result.t == pytest.approx(3 * math.sqrt(2))
    assert result.wilcoxon_p == pytest.approx(2 / 2**5)


@pytest.mark.parametrize("differences", [[], [1.0], [2.0, 2.0, 2.0], [0.0, 0.0], [0.0, 1.0, -1.0, 2.0]])
def test_few_or_equal_differences_are_no_error(differences):
    assert paired_statistics.paired(differences).n == len(differences)


def summary_of(low, high, n=5):
    return paired_statistics.Paired(n, (low + high) / 2, 1.0, low, high, 0.0, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("low", "high", "n", "verdict"),
    [
        (7.0, 9.5, 12, "reproduced"),
        (0.2, 1.4, 12, "sign reproduced, size not"),
        (-0.2, 9.5, 12, "not reproduced"),
        (-3.0, -1.0, 12, "not reproduced"),
        (7.0, 9.5, 2, "not testable here"),
    ],
)
def test_verdict_of_a_gain_follows_from_the_interval(low, high, n, verdict):
    assert paired_statistics.gain_verdict(summary_of(low, high, n), 8.98) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.4, 0.6, "reproduced"),
        (-3.0, 2.0, "not decided: interval too wide"),
        (0.5, 2.0, "not reproduced"),
    ],
)
def test_verdict_of_an_equality_needs_a_narrow_interval(low, high, verdict):
    assert paired_statistics.equal_verdict(summary_of(low, high)) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.0, 0.5, "reproduced"),
        (-2.0, 2.0, "not decided: interval too wide"),
        (0.5, 1.0, "not reproduced"),
    ],
)
def test_verdict_of_a_value_in_points_needs_a_narrow_interval(low, high, verdict):
    assert paired_statistics.value_verdict(summary_of(low, high), 0.28, 0.28, 1.0) == verdict


def test_the_first_claims_figure_and_verdict_turn_with_the_runs():
    up = claims.patch_claims(pairs([9.0, 9.5, 8.5, 9.2]))[0]
    down = claims.patch_claims(pairs([-9.0, -9.5, -8.5, -9.2]))[0]
    assert (up.verdict, down.verdict) == ("reproduced", "not reproduced")
    assert up.figure.startswith("+9.05 points [+8.38, +9.72] (n = 4)")
    assert "4/4 won" in up.figure
    assert "0/4 won" in down.figure


def test_grid_runs_do_not_count_as_pairs():
    runs = pairs([1.0, 1.2, 0.8])
    grid = [
        record(arm, patch_stages.FIRST_GRID_SEED, 0.9 if arm == "adamw" else 0.1) for arm in ("adamw", "scale_free")
    ]
    assert claims.patch_claims([*runs, *grid]) == claims.patch_claims(runs)


def test_movement_is_compared_per_unit_of_learning_rate():
    runs = [record("adamw", s, 0.3, movement=3e-3, lr=3e-3) for s in range(3)]
    runs += [record("fixed_step", s, 0.3, movement=1e-4, lr=1e-2) for s in range(3)]
    ratio = evidence.movement_ratio(evidence.by_arm(runs, MAIN), "adamw", "fixed_step")
    assert ratio.mean == pytest.approx(100)


def test_slope_is_the_gain_of_a_doubling():
    runs = [run for i in (1000, 2000, 4000) for run in pairs([i / 1000, 1 + i / 1000, i / 1000], images=i)]
    # gains 1, 2, 4 at log2 0, 1, 2: least squares slope 3/2.
    runs += pairs([0.0], images=4000, decay=1.0)
    assert evidence.slopes(runs, evidence.equal_steps(runs, MAIN)) == pytest.approx([1.5, 1.5, 1.5])


def test_equal_epochs_are_compared_among_themselves():
    runs = [run for i in (2000, 10_000) for run in pairs([1.0, 2.0], images=i, steps=8 * i // 64, decay=1.0)]
    runs += pairs([5.0, 5.0]) + pairs([7.0, 7.0], images=10_000)  # equal steps, and other numbers of epochs
    found = evidence.equal_epochs(runs, MAIN, 1.0)
    assert [(c["images"], c["steps"]) for c in found] == [(2000, 250), (10_000, 1250)]
    assert evidence.slopes(runs, found) == pytest.approx([0.0, 0.0])
    assert evidence.equal_epochs(runs, MAIN, 0.05) == []


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


def test_report_draws_and_writes_from_the_runs_alone(tmp_path):
    for run in pairs([1.0, 1.2, 0.8]):
        harness.append_record(tmp_path / "patches.jsonl", run)
    assert report.main(["--results", str(tmp_path)]) == 0
    text = (tmp_path / "REPORT.md").read_text()
    assert "+1.00 points [+0.50, +1.50] (n = 3)" in text
    pictures = re.findall(r"!\[\]\((.*?)\)", text)
    assert pictures
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in pictures)


def test_only_what_is_between_the_markers_changes(tmp_path):
    for run in pairs([1.0, 1.2, 0.8]):
        harness.append_record(tmp_path / "patches.jsonl", run)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    assert report.main(["--results", str(tmp_path), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text == f"before\n{report.START}\n{report.claims(tmp_path)}\n{report.END}\nafter\n"
    assert "old" not in text


def test_readme_without_markers_is_refused_and_left_alone(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("no markers")
    assert report.main(["--results", str(tmp_path), "--readme", str(readme)]) == 2
    assert readme.read_text() == "no markers"
    assert "must hold" in capsys.readouterr().err


def test_report_in_the_repository_is_what_its_runs_give():
    assert (harness.RESULTS / "REPORT.md").read_text(encoding="utf-8") == report.report(harness.RESULTS)


@pytest.mark.skipif(not README.exists(), reason="README.md is not written yet")
def test_readme_table_is_what_the_runs_give():
    text = README.read_text(encoding="utf-8")
    assert text == report.put_between(text, report.claims(harness.RESULTS))


def test_records_are_not_changed_by_the_report():
    runs = pairs([1.0, 1.2, 0.8])
    before = copy.deepcopy(runs)
    claims.patch_claims(runs)
    assert runs == before


def tuned(gains, lr):
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
        ([[1, 1.1, 1.2], [1, 1.1, 1.2]], "ahead"),
        ([[1, -2, 3], [1, -2, 1]], "level"),
        ([[1, 1.1, 1.2], [-1, -1.1, -1.2]], "depends on lr"),
        ([[1, 2], [1, 2]], "not testable here"),
        ([[1, 1.1, 1.2], [1, 2]], "ahead"),
    ],
)
def test_fine_tuning_is_compared_at_each_learning_rate(gains, verdict):
    (row,) = claims.finetune_claims([run for lr, values in zip((1e-4, 1e-3), gains, strict=True)
                                     for run in tuned(values, lr)])  # fmt: skip
    assert row.verdict == verdict
    assert "lr 0.0001: " in row.figure
    assert "lr 0.001: " in row.figure


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
    runs = [*tuned([1.0] * 5, 1e-4), *tuned([1.0, 2.0], 1e-3)]
    lines = report.missing([], [], runs).splitlines()
    assert [line for line in lines if "fine-tuning" in line] == ["- fine-tuning, lr 0.001: 2 of 5 pairs"]


def test_cells_with_too_few_pairs_are_named_apart():
    text = report_sections.dominance({(0.1, 10): [1.0, 1.1, 1.2], (0.2, 20): [1.0, 1.1]})
    assert "above 0) at decay × images: 0.1 × 10;" in text
    assert text.endswith("with too few pairs: 0.2 × 20.")
