"""Rows of the table for classes of timm that no architecture uses, on the layers themselves."""

import copy
from typing import Any

import pytest
import timm
import torch
from support.attention_case import heads
from support.parts import rows_of
from support.patch_cases import randomise_, relative
from timm.layers import NonLocalAttn, RotAttentionPool2d
from timm.layers.attention2d import Attention2d
from torch import nn

import stiefel_geo


def sim_pool(name: str, **options: object) -> nn.Module:
    """Older timm has no such class."""
    module: Any = pytest.importorskip("timm.layers.other_pool", reason="this timm has no SimPool")
    pool: nn.Module = getattr(module, name)(32, num_heads=4, **options)
    return pool


MAPS, TOKENS = (2, 32, 8, 8), (2, 9, 32)
QK_POOLS = {"q": "q 4x8", "k": "k 4x8"}
LAYERS = {
    "Attention2d": (lambda: Attention2d(32, num_heads=4, bias=True), MAPS, {"qkv": "q 4x8, k 4x8, v 32"}),
    "Attention2d, head first": (
        lambda: Attention2d(32, num_heads=4, head_first=True), MAPS, {"qkv": "4 * (q 1x8, k 1x8, v 8)"},
    ),
    "RotAttentionPool2d": (lambda: RotAttentionPool2d(32, num_heads=4, ref_feat_size=8, qkv_separate=True), MAPS,
                           QK_POOLS),
    "RotAttentionPool2d, fused": (lambda: RotAttentionPool2d(32, num_heads=4, ref_feat_size=8), MAPS,
                                  {"qkv": "q 4x8, k 4x8, v 32"}),
    "NonLocalAttn": (lambda: NonLocalAttn(32, rd_channels=16), MAPS, {"t": "q 1x16", "p": "k 1x16"}),
    "SimPool1d": (lambda: sim_pool("SimPool1d", qkv_bias=True), TOKENS, QK_POOLS),
    "SimPool2d": (lambda: sim_pool("SimPool2d", qkv_bias=True), MAPS, QK_POOLS),
}  # fmt: skip


@pytest.mark.parametrize(("make", "size", "rows"), LAYERS.values(), ids=LAYERS)
def test_layer_that_no_architecture_uses_keeps_its_function_head_by_head(make, size, rows) -> None:
    torch.manual_seed(0)
    layer = randomise_(make()).double().eval()
    plain, x = copy.deepcopy(layer), torch.randn(size, dtype=torch.float64)
    try:
        before = plain(x)
    except RuntimeError as error:  # RotAttentionPool2d's in timm 1.0.20
        pytest.skip(f"the layer as timm {timm.__version__} has it fails by itself: {error}")
    stiefel_geo.patch(layer)
    assert relative(layer(x), before) < 1e-10
    for path, spec in rows.items():
        by_hand = [part for role, part in heads(plain.get_parameter(f"{path}.weight"), spec) if role in ("q", "k")]
        made_by = rows_of(layer.get_submodule(path))
        assert [tuple(F.shape) for F in made_by.frames] == [tuple(part.mT.shape) for part in by_hand]
        for F, C, part in zip(made_by.frames, made_by.core, by_hand, strict=True):
            assert relative(F @ C, part.mT) < 1e-12


def test_a_layer_of_a_class_that_lacks_what_its_layout_names_is_refused_with_the_rule() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(8, 16)

    stiefel_geo.register_attention(Bare, stiefel_geo.Layout({"qk": "q k"}, heads="number_of_heads"))
    with pytest.raises(ValueError, match=r"reads what this module has not: .*number_of_heads"):
        stiefel_geo.patch(Bare())
