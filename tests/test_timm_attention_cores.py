"""Cores that do not learn on every kind of attention class, and a class of the user's own."""

import pytest
import torch
from support.attention_case import Case
from support.attention_cases import PATCHED
from support.patch_cases import relative
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.attention.layouts import Layout
from stiefel_geo.attention.projections import projections_of

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
    for projection in projections_of(attention):
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
    stiefel_geo.register_attention(Custom, Layout({"to_q": "q", "to_kv": "k v"}, heads="heads"))
    model, x = Custom().double(), torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = model(x)
    stiefel_geo.patch(model)
    assert relative(model(x), before) < 1e-12
