"""The table of attention classes: every class on a real, small architecture of timm."""

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from support.attention_case import Case, heads
from support.attention_cases import CASES, DEGENERATE, PATCHED
from support.parts import projection, rows_of
from support.patch_cases import relative
from timm.models.gcvit import WindowAttentionGlobal
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.attention.layouts import Rows
from stiefel_geo.attention.parametrization import FrameRows
from stiefel_geo.attention.state_dicts import frame_rows_by_prefix, plain_key
from stiefel_geo.integrations.timm_attention import TABLE

each_class = pytest.mark.parametrize("case", PATCHED, ids=lambda case: case.cls)


@dataclass
class Study:
    """What patching one architecture did."""

    report: stiefel_geo.PatchReport
    error: float  # of the output, float64
    inference_error: float  # the same under torch.inference_mode
    unpatched_error: float
    keys: tuple[list[str], list[str]]  # plain, after unpatch
    dead: list[str]  # stacks with a frame that has no gradient
    still: list[str]  # stacks with a frame that one step did not move
    changed_values: list[str]  # projections of the first module with value rows that are not bit-identical
    head_error: float  # of the first module's frames against the heads cut by hand


@cache
def study(index: int) -> Study:
    case = PATCHED[index]
    model, x = case.with_something_between(), case.images()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        before = model(x)
    report = stiefel_geo.patch(model)
    inferring = copy.deepcopy(model)
    with torch.inference_mode():
        inferred = inferring(x)
    output = model(x)
    output.square().sum().backward()
    dead = [name for name, frame in stiefel_geo.frames(model) if _norms(frame.grad).min() == 0]
    folded = copy.deepcopy(model)
    stiefel_geo.unpatch(folded)
    with torch.no_grad():
        after = folded(x)
    changed, head_error = _first_module(case, plain, model)
    return Study(
        report, relative(output, before), relative(inferred, before), relative(after, before),
        (list(plain.state_dict()), list(folded.state_dict())), dead, _still(model), changed, head_error,
    )  # fmt: skip


def _norms(frames: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.matrix_norm(frames)
    return norms


@dataclass
class SingleStudy:
    """What patch and unpatch did to one architecture in float32, while another device was the default."""

    error: float  # of the output
    tensor_error: float  # of any tensor after unpatch, over its largest entry
    changed: list[str]  # tensors without query or key rows that are not bit-identical
    same_keys: bool  # of plain_state_dict, in order


@cache
def single_study(index: int) -> SingleStudy:
    case = PATCHED[index]
    model, x = case.with_something_between(torch.float32), case.images(torch.float32)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(x)
    with torch.device("meta"):
        stiefel_geo.patch(model)
        keys = list(stiefel_geo.plain_state_dict(model))
        made = {plain_key(prefix) for prefix in frame_rows_by_prefix(model)}
    with torch.no_grad():
        error = relative(model(x), before)
    with torch.device("meta"):
        stiefel_geo.unpatch(model)
    after = model.state_dict()
    worst = max(float((after[n] - W).abs().max() / W.abs().max()) for n, W in state.items() if n in made)
    changed = [n for n, W in state.items() if n not in made and not torch.equal(after[n], W)]
    return SingleStudy(error, worst, changed, keys == list(state) == list(after))


def _still(model: nn.Module) -> list[str]:
    before = {name: frame.detach().clone() for name, frame in stiefel_geo.frames(model)}
    stiefel_geo.ScaleFreeRiemannianAdam(model.parameters(), lr=1e-3).step()
    return [name for name, frame in stiefel_geo.frames(model) if _norms(frame - before[name]).min() == 0]


def _first_module(case: Case, plain: nn.Module, patched: nn.Module) -> tuple[list[str], float]:
    changed, errors = [], [0.0]
    _, old = case.first(plain)
    _, new = case.first(patched)
    for path, spec in case.rows.items():
        weights = [projection(attention, path).weight for attention in (old, new)]
        cuts = [[rows for role, rows in heads(weight, spec) if role not in ("q", "k")] for weight in weights]
        if not all(torch.equal(a, b) for a, b in zip(*cuts, strict=True)):
            changed.append(path)
        by_hand = [rows for role, rows in heads(weights[0], spec) if role in ("q", "k")]
        errors.append(_head_error(new.get_submodule(path), by_hand))
    return changed, max(errors)


def _head_error(owner: nn.Module, by_hand: list[Tensor]) -> float:
    """Largest relative error of W = F·C against a head's rows Wᵀ (r, d), cut by hand; infinite where shapes differ."""
    carried = rows_of(owner)
    frames = [frame for _, stack in carried.named_frames() for frame in stack.detach()]
    cores = [core for _, stack in carried.named_cores() for core in stack.detach()]
    if [frame.shape for frame in frames] != [rows.mT.shape for rows in by_hand]:
        return float("inf")
    triples = zip(frames, cores, by_hand, strict=True)
    return max(relative(F @ C, rows.mT) for F, C, rows in triples)


def of(case: Case) -> Study:
    return study(PATCHED.index(case))


# Rows for classes that no architecture of timm uses; tests of their own, in test_timm_unused.py.
UNUSED = {
    "layers.attention2d.Attention2d",
    "layers.attention_pool2d.RotAttentionPool2d",
    "layers.non_local_attn.NonLocalAttn",
    "layers.other_pool.SimPool1d",
    "layers.other_pool.SimPool2d",
}


def test_every_row_of_the_table_has_a_case() -> None:
    assert {case.cls for case in CASES} | UNUSED == set(TABLE)
    assert len(CASES) == 62


@each_class
def test_output_is_the_same_in_float64_whatever_stands_behind_the_projections(case: Case) -> None:
    assert of(case).error < 1e-10


@each_class
def test_output_is_the_same_under_inference_mode(case: Case) -> None:
    assert of(case).inference_error < 1e-10


@each_class
def test_output_is_the_same_in_float32_whatever_stands_behind_the_projections(case: Case) -> None:
    assert single_study(PATCHED.index(case)).error < 1e-5


@each_class
def test_patch_and_unpatch_give_every_tensor_back(case: Case) -> None:
    assert single_study(PATCHED.index(case)).tensor_error < 5e-7


@each_class
def test_patch_and_unpatch_leave_every_other_tensor_as_it_was(case: Case) -> None:
    assert single_study(PATCHED.index(case)).changed == []


@each_class
def test_plain_state_dict_has_timms_keys_in_order(case: Case) -> None:
    assert single_study(PATCHED.index(case)).same_keys


@each_class
def test_frames_are_those_of_the_heads_cut_by_hand(case: Case) -> None:
    assert of(case).head_error < 1e-9


@each_class
def test_value_rows_are_bit_identical(case: Case) -> None:
    assert of(case).changed_values == []


def rest_of_biases(model: torch.nn.Module, layouts: dict[str, Rows]) -> dict[str, torch.Tensor]:
    """The bias entries of the rows that are neither query nor key, by projection."""
    found = {}
    for name, rows in layouts.items():
        bias = getattr(model.get_submodule(name), "bias", None)
        rest = None if bias is None else rows.split(bias.detach()[:, None])[1]
        if rest is not None:
            found[name] = rest
    return found


@each_class
def test_value_biases_are_bit_identical(case: Case) -> None:
    model = case.model()
    plain = copy.deepcopy(model)
    stiefel_geo.patch(model)
    suffix = ".parametrizations.weight.0"
    carriers = {name: part for name, part in model.named_modules() if isinstance(part, FrameRows)}
    layouts = {name.removesuffix(suffix): part.rows for name, part in carriers.items() if name.endswith(suffix)}
    before, after = rest_of_biases(plain, layouts), rest_of_biases(model, layouts)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@each_class
def test_every_frame_has_a_gradient(case: Case) -> None:
    assert of(case).dead == []


@each_class
def test_every_frame_moves_in_one_step(case: Case) -> None:
    assert of(case).still == []


@each_class
def test_unpatch_gives_the_same_output_and_timms_keys_in_order(case: Case) -> None:
    plain, folded = of(case).keys
    assert folded == plain
    assert of(case).unpatched_error < 1e-10


@each_class
def test_the_whole_architecture_is_covered(case: Case) -> None:
    report = of(case).report
    assert f"timm.{case.cls}" in {entry.cls for entry in report.patched}
    assert all("no query or key projection" in entry.reason for entry in report.skipped)


def test_global_blocks_of_gcvit_have_frames_of_keys_alone() -> None:
    (case,) = [case for case in PATCHED if case.cls == "models.gcvit.WindowAttentionGlobal"]
    plain = case.model()
    model = copy.deepcopy(plain)
    stiefel_geo.patch(model)
    name = next(name for name, module in plain.named_modules() if getattr(module, "use_global", False) is True)
    old, new = plain.get_submodule(name), model.get_submodule(name)
    qkv = projection(old, "qkv")
    assert isinstance(old, WindowAttentionGlobal)
    keys = qkv.weight.detach()[: qkv.weight.shape[1]].unflatten(0, (old.num_heads, -1))
    assert _head_error(projection(new, "qkv"), list(keys)) < 1e-12


def test_the_degenerate_class_is_skipped_with_the_reason() -> None:
    (case,) = [case for case in CASES if case.cls == DEGENERATE]
    report = stiefel_geo.patch(case.model())
    assert {entry.reason for entry in report.skipped if entry.cls == f"timm.{DEGENERATE}"} == {TABLE[DEGENERATE].skip}


@pytest.fixture
def shifted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is wrong by one row everywhere."""
    split, join = Rows.split, Rows.join
    monkeypatch.setattr(Rows, "split", lambda self, matrix: split(self, matrix.roll(1, 0)))
    monkeypatch.setattr(Rows, "join", lambda self, stacks, rest: join(self, stacks, rest).roll(-1, 0))


FUSED = [case for case in PATCHED if any(" " in spec and "v" in spec for spec in case.rows.values())]


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.cls)
def test_a_table_shifted_by_one_row_fails(case: Case, shifted_rows: None) -> None:
    plain = case.model()
    model = copy.deepcopy(plain)
    stiefel_geo.patch(model)
    _, head_error = _first_module(case, plain, model)
    assert head_error > 1e-3
