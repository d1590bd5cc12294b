"""The table of attention classes: every class on a real, small architecture of timm."""

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from attention_cases import CASES, Case, heads
from patch_cases import relative
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.carrying import plan_of
from stiefel_geo.frames import FrameRows
from stiefel_geo.integrations.timm_attention import TABLE, register_attention
from stiefel_geo.layouts import Layout, Rows

DEGENERATE = "models.csatv2.SpatialTransformerBlock"  # its output does not depend on W_Q
PATCHED = [case for case in CASES if case.cls != DEGENERATE]
each_class = pytest.mark.parametrize("case", PATCHED, ids=lambda case: case.cls)


@dataclass
class Study:
    """What patching one architecture did."""

    report: stiefel_geo.PatchReport
    error: float  # of the output, float64
    single_error: float  # float32
    unpatched_error: float
    keys: tuple[list[str], list[str]]  # plain, after unpatch
    dead: list[str]  # stacks with a frame that has no gradient
    still: list[str]  # stacks with a frame that one step did not move
    changed_values: list[str]  # projections of the first module with value rows that are not bit-identical
    head_error: float  # of the first module's frames against the heads cut by hand


@cache
def study(index: int) -> Study:
    case = PATCHED[index]
    model, x = case.model(), case.images()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        before = model(x)
    report = stiefel_geo.patch(model)
    output = model(x)
    output.square().sum().backward()
    dead = [name for name, frame in stiefel_geo.frames(model) if _norms(frame.grad).min() == 0]
    folded = copy.deepcopy(model)
    stiefel_geo.unpatch(folded)
    with torch.no_grad():
        after = folded(x)
    changed, head_error = _first_module(case, plain, model)
    return Study(
        report, relative(output, before), _single_error(case), relative(after, before),
        (list(plain.state_dict()), list(folded.state_dict())), dead, _still(model), changed, head_error,
    )  # fmt: skip


def _norms(frames: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(frames)


def _single_error(case: Case) -> float:
    model, x = case.model(torch.float32), case.images(torch.float32)
    with torch.no_grad():
        before = model(x)
        stiefel_geo.patch(model)
        return relative(model(x), before)


def _still(model: nn.Module) -> list[str]:
    before = {name: frame.detach().clone() for name, frame in stiefel_geo.frames(model)}
    stiefel_geo.ScaleFreeRiemannianAdam(model.parameters(), lr=1e-3).step()
    return [name for name, frame in stiefel_geo.frames(model) if _norms(frame - before[name]).min() == 0]


def _first_module(case: Case, plain: nn.Module, patched: nn.Module) -> tuple[list[str], float]:
    changed, errors = [], [0.0]
    _, old = case.first(plain)
    _, new = case.first(patched)
    for path, spec in case.rows.items():
        weights = [attention.get_submodule(path).weight for attention in (old, new)]
        cuts = [[rows for role, rows in heads(weight, spec) if role not in ("q", "k")] for weight in weights]
        if not all(torch.equal(a, b) for a, b in zip(*cuts, strict=True)):
            changed.append(path)
        by_hand = [rows for role, rows in heads(weights[0], spec) if role in ("q", "k")]
        errors.append(_head_error(new.get_submodule(path), by_hand))
    return changed, max(errors)


def _head_error(owner: nn.Module, by_hand: list[Tensor]) -> float:
    """Largest relative error of a head's frame and core against its rows Wᵀ (r, d), cut by hand.

    Polar: of W = F·C. Canonical: of W = FFᵀW, as the core is in another gauge. Infinite where shapes differ.
    """
    carried = owner.parametrizations.weight[0]
    frames = [frame for _, stack in carried.named_frames() for frame in stack.detach()]
    cores = [core for _, stack in carried.named_cores() for core in stack.detach()]
    if [frame.shape for frame in frames] != [rows.mT.shape for rows in by_hand]:
        return float("inf")
    triples = zip(frames, cores, by_hand, strict=True)
    return max(relative(F @ C if C.dim() == 2 else F @ (F.mT @ rows.mT), rows.mT) for F, C, rows in triples)


def of(case: Case) -> Study:
    return study(PATCHED.index(case))


def test_every_class_of_the_notes_has_a_row_and_a_case() -> None:
    assert len(CASES) == 62
    assert {case.cls for case in CASES} <= set(TABLE)


@each_class
def test_output_is_the_same_in_float64(case: Case) -> None:
    assert of(case).error < 1e-9


@each_class
def test_output_is_the_same_in_float32(case: Case) -> None:
    assert of(case).single_error < 1e-5


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
    assert of(case).unpatched_error < 1e-9


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
    keys = old.qkv.weight.detach()[: old.qkv.in_features].unflatten(0, (old.num_heads, -1))
    assert _head_error(new.qkv, list(keys)) < 1e-12


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
# Classes whose logits are plain, one per order of the rows.
CANONICAL = ("layers.attention.Attention", "models.beit.Attention", "models.maxxvit.Attention2d",
             "models.tiny_vit.Attention", "layers.diff_attention.DiffAttention")  # fmt: skip


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.cls)
def test_a_table_shifted_by_one_row_fails(case: Case, shifted_rows: None) -> None:
    plain = case.model()
    model = copy.deepcopy(plain)
    stiefel_geo.patch(model)
    _, head_error = _first_module(case, plain, model)
    with torch.no_grad():  # square canonical frames span everything, but the logits are not the same
        assert head_error > 1e-3 or relative(model(case.images()), plain(case.images())) > 1e-6


@pytest.mark.parametrize("cls", CANONICAL)
def test_output_of_a_canonical_patch_shifted_by_one_row_differs(cls: str, shifted_rows: None) -> None:
    (case,) = [case for case in PATCHED if case.cls == cls]
    model, x = case.model(), case.images()
    before = model(x)
    stiefel_geo.patch(model)
    assert relative(model(x), before) > 1e-5


IDENTITY = [case for case in PATCHED if case.cls.startswith(("layers.", "models.cait", "models.volo", "models.eva"))]


@pytest.mark.parametrize("case", IDENTITY[:10], ids=lambda case: case.cls)
def test_frozen_cores_keep_the_function_of_every_kind_of_class(case: Case) -> None:
    model, x = case.model(), case.images()
    before = model(x)
    report = stiefel_geo.patch(model, core="freeze")
    assert relative(model(x), before) < 1e-9
    assert {entry.change for entry in report.patched} == {0.0}


@pytest.mark.parametrize("case", IDENTITY[:10], ids=lambda case: case.cls)
def test_identity_leaves_frames_alone_and_reports_the_change(case: Case) -> None:
    model = case.model()
    report = stiefel_geo.patch(model, core="identity")
    _, attention = case.first(model)
    for projection in plan_of(attention).projections:
        weight = getattr(projection.owner, projection.tensor).detach().flatten(1)
        for stack in projection.rows.split(weight)[0]:
            assert stiefel_geo.stiefel.defect(stack).max() < 1e-12
    assert min(entry.change for entry in report.patched) > 1e-3


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.to_q, self.to_kv = 2, nn.Linear(12, 8), nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (2, 4)).transpose(-3, -2)
        k, v = self.to_kv(x).unflatten(-1, (2, 2, 4)).transpose(-4, -2).unbind(-3)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_registered_class_of_the_users_own_is_patched() -> None:
    register_attention(Custom, Layout({"to_q": "q", "to_kv": "k v"}, heads="heads", plain=True))
    model, x = Custom().double(), torch.randn(3, 5, 12, dtype=torch.float64)
    before = model(x)
    report = stiefel_geo.patch(model)
    assert relative(model(x), before) < 1e-12
    assert report.patched[0].factorisation == "canonical"
