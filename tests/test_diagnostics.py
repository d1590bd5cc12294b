"""Measurements of a live model: what they equal, and that they change nothing."""

import copy
import itertools
from collections.abc import Callable

import pytest
import timm
import torch
from support.frame_parameters import grad_of
from support.parts import qkv, rows_of
from support.patch_cases import OPTIONS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stiefel_geo
from stiefel_geo import diagnostics
from stiefel_geo.averaging import project_frames_

FRAMES = "blocks.0.attn.qkv.weight"  # one stack: the query heads, then the key heads


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3
    ).double()
    for block in (0, 1):  # timm's initial queries and keys are too small for logits to matter
        nn.init.normal_(qkv(model, block).weight, std=0.3)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32).double()), torch.arange(8) % 3)
        loss.backward()
        optimizer.step()


@pytest.fixture
def plain() -> nn.Module:
    return small_vit()


@pytest.fixture
def patched(plain: nn.Module) -> nn.Module:
    model = copy.deepcopy(plain)
    stiefel_geo.patch(model)
    return model


def heads_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    """W_Q, W_K (4, 32, 8) of the first block, read off the weight by hand."""
    query, key, _ = qkv(model).weight.detach().view(3, 4, 8, 32)
    return query.mT.clone(), key.mT.clone()


def test_defect_is_the_frobenius_distance_of_the_gram_matrix_from_identity(patched: nn.Module) -> None:
    name, frame = next(stiefel_geo.frames(patched))
    frame.data[0] *= 2.0  # WᵀW = 4 I, so ‖3 I‖_F = 3√8
    found = diagnostics.defect(patched)[name]
    torch.testing.assert_close(found[0], torch.tensor(3 * 8**0.5).double())
    assert found[1:].max() < 1e-13


def test_movement_of_a_frame_is_the_frobenius_norm_of_its_change(patched: nn.Module) -> None:
    before = diagnostics.snapshot(patched)
    _, frame = next(stiefel_geo.frames(patched))
    frame.data[5, 3, 2] += 0.25
    moved = diagnostics.movement(patched, before)
    assert moved[FRAMES].tolist() == pytest.approx([0, 0, 0, 0, 0, 0.25, 0, 0], abs=1e-15)


def test_movement_of_a_plain_model_is_that_of_its_query_and_key_heads(plain: nn.Module) -> None:
    before, (Q, K) = diagnostics.snapshot(plain), heads_of(plain)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    Q_after, K_after = heads_of(plain)
    expected = torch.cat([Q_after - Q, K_after - K]).square().sum((1, 2)).sqrt()
    torch.testing.assert_close(diagnostics.movement(plain, before)[FRAMES], expected)


def test_patched_and_plain_models_are_measured_under_one_name_and_shape(plain: nn.Module, patched: nn.Module) -> None:
    shapes = [{name: W.shape for name, W in diagnostics.snapshot(m).matrices.items()} for m in (plain, patched)]
    assert shapes[0] == shapes[1]
    assert shapes[0][FRAMES] == (8, 32, 8)


def test_spectrum_of_cores_is_that_of_the_assembled_weights(patched: nn.Module) -> None:
    Q, K = heads_of(patched)
    torch.testing.assert_close(diagnostics.spectrum(patched)[FRAMES], torch.linalg.svdvals(torch.cat([Q, K])))


def test_spectrum_of_a_trained_core_is_that_of_the_assembled_weights(patched: nn.Module) -> None:
    with torch.no_grad():  # training does not keep a core symmetric; its symmetric part is what acts
        rows_of(qkv(patched)).core += 0.1 * torch.randn(8, 8, 8).double()
    Q, K = heads_of(patched)
    torch.testing.assert_close(diagnostics.spectrum(patched)[FRAMES], torch.linalg.svdvals(torch.cat([Q, K])))


def test_spectrum_of_a_plain_model_is_that_of_its_heads(plain: nn.Module) -> None:
    Q, K = heads_of(plain)
    torch.testing.assert_close(diagnostics.spectrum(plain)[FRAMES], torch.linalg.svdvals(torch.cat([Q, K])))


def test_spectrum_of_pure_frames_is_one(plain: nn.Module) -> None:
    stiefel_geo.patch(plain, core="identity")
    assert torch.equal(diagnostics.spectrum(plain)[FRAMES], torch.ones(8, 8).double())


class Decomposed(TorchDispatchMode):
    """Shapes of the matrices that go into singular value decompositions."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "svd" in func._schema.name:
            self.shapes.add(tuple(args[0].shape[-2:]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("measure", [diagnostics.spectrum, project_frames_], ids=["spectrum", "project_frames_"])
@pytest.mark.parametrize("is_patched", [False, True], ids=["plain", "patched"])
def test_no_singular_value_decomposition_is_of_more_than_a_core(plain: nn.Module, is_patched: bool, measure) -> None:
    if is_patched:
        stiefel_geo.patch(plain)
    with Decomposed() as decomposed:
        measure(plain)
    assert decomposed.shapes == ({(8, 8)} if is_patched or measure is diagnostics.spectrum else set())


def test_gauge_drift_of_a_move_along_the_orbit_is_one(plain: nn.Module) -> None:
    before = diagnostics.snapshot(plain)
    move(plain, lambda Q, K, B: (Q @ B, -K @ B.mT))
    torch.testing.assert_close(diagnostics.gauge_drift(plain, before)["blocks.0.attn"], torch.ones(4).double())


def test_gauge_drift_of_a_move_orthogonal_to_the_orbit_is_zero(plain: nn.Module) -> None:
    before = diagnostics.snapshot(plain)

    def outside(Q: Tensor, K: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        return Q @ torch.linalg.inv(Q.mT @ Q) @ B, K @ torch.linalg.inv(K.mT @ K) @ B.mT

    move(plain, outside)
    assert diagnostics.gauge_drift(plain, before)["blocks.0.attn"].max() < 1e-12


def test_gauge_drift_is_zero_where_nothing_moved(plain: nn.Module) -> None:
    drift = diagnostics.gauge_drift(plain, diagnostics.snapshot(plain))
    assert all(torch.equal(share, torch.zeros(4).double()) for share in drift.values())


@pytest.mark.skipif("num_kv_heads" not in OPTIONS, reason="this timm has no grouped keys")
def test_gauge_drift_leaves_out_modules_that_do_not_pair_queries_with_keys() -> None:
    from timm.models.eva import Eva

    shared = Eva(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_kv_heads=1, qkv_fused=False,
                 attn_type="rope", use_rot_pos_emb=True)  # fmt: skip
    assert diagnostics.gauge_drift(shared, diagnostics.snapshot(shared)) == {}


def move(model: nn.Module, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Add `change`(W_Q, W_K, B) to the first block's query and key heads, B drawn at random."""
    Q, K = heads_of(model)
    dQ, dK = change(Q, K, torch.randn(4, 8, 8, dtype=torch.float64))
    with torch.no_grad():
        qkv(model).weight.view(3, 4, 8, 32)[:2] += torch.stack([dQ.mT, dK.mT])


def test_counts_are_those_of_the_steps_taken_capped_and_skipped(patched: nn.Module) -> None:
    optimizer = stiefel_geo.ScaleFreeRiemannianAdam(patched.parameters(), lr=0.1, trust_radius=1e-2)
    train(patched, optimizer, steps=3)
    _, frame = next(stiefel_geo.frames(patched))
    frame.grad[2] = float("nan")
    optimizer.step()
    found = diagnostics.counts(optimizer)
    nan_frame = [2]
    assert found.steps.tolist() == [4 - (i in nan_frame) for i in range(16)]
    assert found.capped.tolist() == [4 - (i in nan_frame) for i in range(16)]
    assert found.skipped.tolist() == [int(i in nan_frame) for i in range(16)]


def test_counts_of_an_optimizer_without_frames_are_empty(plain: nn.Module) -> None:
    optimizer = torch.optim.AdamW(plain.parameters())
    train(plain, optimizer)
    assert [column.numel() for column in diagnostics.counts(optimizer)] == [0, 0, 0]


@pytest.mark.parametrize("core", ["learn", "freeze", "identity"])
def test_measuring_changes_neither_model_nor_optimizer(plain: nn.Module, core: str) -> None:
    stiefel_geo.patch(plain, core=core)
    twin = copy.deepcopy(plain)
    for model, look in ((plain, True), (twin, False)):
        optimizer = stiefel_geo.ScaleFreeRiemannianAdam(model.parameters())
        for _ in range(2):
            before = diagnostics.snapshot(model) if look else None
            train(model, optimizer)
            if before is not None:
                measure_everything(model, optimizer, before)
    pairs = itertools.zip_longest(plain.state_dict().items(), twin.state_dict().items())
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    assert all(torch.equal(grad_of(p), grad_of(q)) for p, q in zip(plain.parameters(), twin.parameters(), strict=True))


def measure_everything(model: nn.Module, optimizer: torch.optim.Optimizer, before: diagnostics.Snapshot) -> None:
    diagnostics.defect(model)
    diagnostics.movement(model, before)
    diagnostics.spectrum(model)
    diagnostics.gauge_drift(model, before)
    diagnostics.counts(optimizer)
