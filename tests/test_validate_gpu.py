"""examples/validate_gpu.py without a GPU: it runs whole, and nothing that goes wrong in it passes unseen."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.example_scripts import EXAMPLES, validate_gpu, validation
from support.matmul_settings import usual_settings

from stiefel_geo.optim import step

rows, stages = validation["rows"], validation["stages"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole smoke run that ended well."""
    out = tmp_path_factory.mktemp("whole")
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(EXAMPLES / "validate_gpu.py"),
        "--device",
        "cpu",
        "--smoke",
        "--out",
        str(out),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    return out


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def found(out: Path, stage: str) -> dict[str, Any]:
    return {row["check"]: row for row in report(out)["stages"][stage]["rows"]}


def test_every_stage_has_rows_and_every_bound_holds(whole):
    assert report(whole)["holds"] is True
    kept = report(whole)["stages"]
    assert list(kept) == list(stages.STAGES)
    assert all(stage["rows"] for stage in kept.values())
    assert {row["holds"] for stage in kept.values() for row in stage["rows"]} == {True, None}


@pytest.mark.parametrize(("stage", "bounded"), [
    ("agreement", 6), ("step", 2), ("step_compiled", 1), ("finetune_bf16", 7), ("finetune_fp16", 3),
    ("finetune_compiled", 3), ("several_gpus", 4),
])  # fmt: skip
def test_a_stage_bounds_what_it_can_without_a_gpu(whole, stage, bounded):
    assert sum(row["holds"] is True for row in found(whole, stage).values()) == bounded


def test_the_step_is_timed_beside_all_others(whole):
    timed = {name.removeprefix("ViT-tiny, ") for name, row in found(whole, "step").items() if " ms" in row["measured"]}
    others = {"geoopt RiemannianAdam", "Landing", "Muon", "AdamW fused", "AdamW foreach"}
    assert {"ours", "ours, layer decay", *others} <= timed


def test_what_needs_a_gpu_is_left_out_with_a_reason(whole):
    (row,) = found(whole, "cuda_tests").values()
    assert (row["measured"], row["holds"]) == ("left out: it needs a CUDA device", None)


def test_the_markdown_report_has_every_row(whole):
    text = (whole / "REPORT.md").read_text()
    rows = [row for stage in report(whole)["stages"].values() for row in stage["rows"]]
    assert all(f"| {row['check']} | {row['measured']} |" in text for row in rows)
    assert f"{sum(row['holds'] is True for row in rows)} bounds hold, 0 fail" in text


FAKE = """
import json, os, sys, time
from pathlib import Path
name, out = sys.argv[sys.argv.index("--stage") + 1], Path(sys.argv[sys.argv.index("--out") + 1])
rows = (out / "stages" / f"{name}.jsonl").open("a")
def row(check, measured="1", bound="", holds=None):
    rows.write(json.dumps(dict(check=check, measured=measured, bound=bound, holds=holds)) + "\\n")
    rows.flush()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the stages that are given as Python statements instead of the real ones; `row` writes one."""

    def with_stages(**bodies: str) -> int:
        cases = [f"if name == {name!r}:\n    {body}\n" for name, body in bodies.items()]
        (tmp_path / "fake.py").write_text(FAKE + "".join(cases))
        monkeypatch.setattr(stages, "SCRIPT", tmp_path / "fake.py")
        return int(validate_gpu.main(["--device", "cpu", "--out", str(tmp_path), "--only", *bodies]))

    return with_stages


def test_a_stage_that_dies_is_a_failed_row_and_the_others_go_on(run, tmp_path):
    assert run(agreement="row('first'); os.abort()", step="row('later')") == 1
    died = found(tmp_path, "agreement")
    assert died["first"]["holds"] is None
    assert (died["the stage"]["measured"], died["the stage"]["holds"]) == ("ended with -6: it said nothing", False)
    assert list(found(tmp_path, "step")) == ["later"]


def test_an_error_in_a_stage_is_quoted(run, tmp_path):
    assert run(agreement="row('first'); raise OSError('no room')") == 1
    assert "OSError: no room" in found(tmp_path, "agreement")["the stage"]["measured"]


def test_a_stage_that_hangs_is_stopped_with_its_children_and_fails(run, tmp_path, monkeypatch):
    monkeypatch.setitem(stages.STAGES, "agreement", ("agreement", 1.5))
    child = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); row('first'); time.sleep(60)"
    assert run(agreement=child, step="row('later')") == 1
    assert found(tmp_path, "agreement")["the stage"]["measured"] == "stopped by its time limit"
    pid = int((tmp_path / "stages" / "agreement.log").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert list(found(tmp_path, "step")) == ["later"]


def test_a_row_that_was_cut_off_leaves_the_rows_before_it(run, tmp_path):
    assert run(agreement="row('first'); rows.write('{\"check\"'); rows.flush(); os.abort()") == 1
    assert list(found(tmp_path, "agreement")) == ["first", "the stage"]


def test_a_stage_without_rows_fails(run, tmp_path):
    assert run(agreement="pass") == 1
    assert found(tmp_path, "agreement")["the stage"]["holds"] is False


def test_stages_are_not_started_once_the_time_of_all_is_over(run, tmp_path, monkeypatch):
    monkeypatch.setattr(validate_gpu, "SECONDS", -1)
    assert run(agreement="row('first')") == 1
    assert found(tmp_path, "agreement")["the stage"]["measured"] == "not started"


def test_the_report_is_rewritten_after_every_stage(run, tmp_path):
    seen = "row(','.join(json.loads((out / 'report.json').read_text())['stages']))"
    assert run(agreement="row('first')", step=seen, several_gpus=seen) == 0
    assert list(found(tmp_path, "step")) == ["agreement"]
    assert list(found(tmp_path, "several_gpus")) == ["agreement,step"]


def test_a_broken_bound_ends_with_1(run, tmp_path):
    assert run(agreement="row('defect', '2', '≤ 1', False)") == 1
    assert report(tmp_path)["holds"] is False
    assert "| defect | 2 | ≤ 1 | **fails** |" in (tmp_path / "REPORT.md").read_text()


def test_bounds_are_met_at_their_value_and_nan_meets_none():
    assert rows.at_most("", 1.0, 1.0).holds is True
    assert rows.at_least("", 1.0, 1.0).holds is True
    assert rows.at_most("", float("nan"), 1.0).holds is False
    assert rows.at_least("", float("nan"), 1.0).holds is False


def broken(stage: str, settings) -> set[str]:
    """Checks of a stage that fail, in this process."""
    return {row.check for row in validation[stage].rows(settings) if row.holds is False}


@pytest.fixture
def smoke(tmp_path):
    yield rows.Settings("cpu", True, tmp_path)
    usual_settings()


def test_a_step_that_leaves_the_manifold_breaks_the_bounds_on_defects(smoke, monkeypatch):
    retract_ = step.retract_

    def halfway(batch, Y, bound, rest):
        retract_(batch, Y, bound, rest)
        for W in batch.G if batch.copies else batch.W:
            W.mul_(1.001)

    monkeypatch.setattr(step, "retract_", halfway)
    assert {f"30 steps in float32 at matmul precision {name}: largest defect" for name in ("highest", "high")} <= (
        broken("agreement", smoke)
    )
    assert "ViT-tiny, ours, one group: largest defect" in broken("step_costs", smoke)


def test_a_compiled_step_of_another_length_breaks_its_bound(smoke, monkeypatch):
    usual = torch.compile
    lengthened = {"foreach": False, "lr": 2e-3}

    def compiled(call, **options):
        call.__self__.param_groups[0].update(lengthened)
        return usual(call, **options)

    monkeypatch.setattr(torch, "compile", compiled)
    assert broken("step_compiled", smoke) == {"ViT-tiny, compiled: from the eager steps"}


TESTS = """
import pytest
pytestmark = pytest.mark.cuda
def test_one(): pass
def test_two(): assert False
def test_three(): pytest.skip("no second device")
"""


def test_results_of_the_cuda_tests_are_counted_and_failures_named(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "test_some.py").write_text(TESTS)
    cuda = rows.Settings("cuda", False, tmp_path)
    found = {row.check: (row.measured, row.holds) for row in validation["cuda_tests"].rows(cuda, tmp_path)}
    assert [found[f"pytest -m cuda, {kind}"] for kind in ("passed", "failed", "skipped")] == [
        ("1", True),
        ("1", False),
        ("1", None),
    ]
    assert [holds for name, (_, holds) in found.items() if name.endswith("::test_two")] == [False]
