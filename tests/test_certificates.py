"""The certificates: they hold for the optimizer, and each fails for the step that breaks its proposition."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import geoopt
import pytest
import torch
from support.broken_steps import broken
from torch import nn

import stiefel_geo
from stiefel_geo import certificates
from stiefel_geo.certificates import Certificate, __main__, decay, equivariance, gauge
from stiefel_geo.certificates.attention import Layer, attention
from stiefel_geo.certificates.certificate import Case, markdown, worst

SHAPE = (16, 4)
SHAPES = [SHAPE, (8, 8), (6, 2)]


def failures(found: list[Certificate]) -> list[str]:
    return [f"{c.proposition}: {c.claim}" for c in found if not c.holds]


@functools.cache
def failures_of(fault: str) -> list[str]:
    return failures(stiefel_geo.certify([SHAPE], optimizer=broken(fault)))


@pytest.mark.parametrize(("shape", "seed"), [(shape, seed) for seed, shape in enumerate(SHAPES)])
def test_every_certificate_holds_for_the_optimizer(shape: tuple[int, int], seed: int) -> None:
    assert failures(stiefel_geo.certify([shape], seed)) == []


def test_every_certificate_holds_for_the_method_written_out_literally() -> None:
    assert failures(stiefel_geo.certify([SHAPE], optimizer=broken(None))) == []


# Fault of the step → the propositions it breaks, and the claim that is there to see it.
FAULTS = {
    "no projection": ({1, 3, 5, 6}, "1: P_W is idempotent, self-adjoint, tangent; its kernel is normal"),
    "no transport": ({3}, "3: 100 steps with momentum: ‖sym(Wᵀξ)‖_F/‖ξ‖_F"),
    "element-wise moment": ({1, 3, 4, 6}, "4: 100 steps from (RW, RG), R ∈ O(d): off R·W_t by"),
    "epsilon in the root": ({1, 2}, "2: 100 steps on gradients × powers of two: frames apart"),
    "no cap": ({3}, "3: κ(W+ξ)/√(1+Δ²)"),
    "QR retraction": ({1, 3, 4}, "1: slope of ‖R(tξ) − Exp(tξ)‖ over three decades"),
    "decay applied": ({1, 3, 5}, "5: 100 steps with weight decay 0 and 10: frames apart"),
    "no noise floor": ({5}, "5: a step on the gradient λW: largest change of an entry"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_step_fails_the_certificates_of_what_it_breaks_and_no_other(fault: str) -> None:
    propositions, claim = FAULTS[fault]
    assert {int(line[0]) for line in failures_of(fault)} == propositions
    assert claim in failures_of(fault)


# What a step cannot break: rows on the manifold, on gradients and on other optimizers. Tests of their own follow.
NOT_THE_STEP = {
    "2: beside it, degree of the fixed-step Riemannian update: off 1 by",
    "4: beside it, an element-wise second moment: off R·W_t by",
    "5: ‖polar((1−ηλ)W) − W‖_F/√r",
    "5: beside it, mean singular value of AdamW's W_Q, W_K, from 1 down to",
    "6: ⟨G_Q, W_Q B⟩ − ⟨G_K, W_K Bᵀ⟩ for all B, relative",
    "6: the same on pure frames, for all skew B",
    "6: share of AdamW's step along the orbit",
    "6: W and a gauge transform of W, biases along, in the SVD gauge: apart by",
    "6: outputs after a signed permutation in the SVD gauge: changed by",
}


def test_every_claim_about_the_step_fails_for_some_fault() -> None:
    claims = {f"{c.proposition}: {c.claim}" for c in stiefel_geo.certify([SHAPE])}
    assert claims - {line for fault in FAULTS for line in failures_of(fault)} == NOT_THE_STEP


def test_an_adaptive_update_in_place_of_the_fixed_step_is_not_of_degree_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geoopt.optim, "RiemannianSGD", geoopt.optim.RiemannianAdam)
    failed = failures(stiefel_geo.certify([SHAPE], propositions=[2]))
    assert failed == ["2: beside it, degree of the fixed-step Riemannian update: off 1 by"]


def test_geoopts_own_second_moment_on_a_stiefel_manifold_turns_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(equivariance.ElementwiseStiefel, "component_inner")
    failed = failures(stiefel_geo.certify([SHAPE], propositions=[4]))
    assert failed == ["4: beside it, an element-wise second moment: off R·W_t by"]


def test_a_projection_that_does_nothing_fails_to_undo_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stiefel_geo.PolarStiefel, "projx", lambda self, x: x)
    failed = failures(stiefel_geo.certify([SHAPE], propositions=[5]))
    assert failed == ["5: ‖polar((1−ηλ)W) − W‖_F/√r"]


def test_adamw_without_decay_keeps_its_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decay, "DECAY", 0.0)
    failed = failures(stiefel_geo.certify([SHAPE], propositions=[5]))
    assert failed == ["5: beside it, mean singular value of AdamW's W_Q, W_K, from 1 down to"]


def check_gauge(**parts: Any) -> list[str]:
    return failures(gauge.check(Case(*SHAPE, seed=0), stiefel_geo.ScaleFreeRiemannianAdam, **parts))


def test_logits_without_a_gauge_fail_the_certificate_of_the_gauge() -> None:
    def normalised(case: Case, generator: torch.Generator) -> Layer:
        return attention(case, generator, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm)

    assert "6: ⟨G_Q, W_Q B⟩ − ⟨G_K, W_K Bᵀ⟩ for all B, relative" in check_gauge(layer_of=normalised)


def test_logits_whose_entries_are_weighted_fail_the_certificates_of_pure_frames_and_of_the_permutation() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.linspace(1, 2, x.shape[-1], dtype=x.dtype)

    def with_scaled_queries(case: Case, generator: torch.Generator) -> Layer:
        layer = attention(case, generator, qkv_bias=True)
        layer.q_norm = Scaled()
        return layer

    failed = check_gauge(layer_of=with_scaled_queries)
    assert "6: the same on pure frames, for all skew B" in failed
    assert "6: outputs after a signed permutation in the SVD gauge: changed by" in failed


def test_gradient_descent_in_place_of_adamw_does_not_drift_along_the_orbit() -> None:
    assert check_gauge(euclidean=torch.optim.SGD) == ["6: share of AdamW's step along the orbit"]


def test_equal_singular_values_fail_the_certificate_of_the_svd_gauge() -> None:
    failed = check_gauge(spectrum=lambda r: torch.ones(r, dtype=torch.float64))
    assert failed == ["6: W and a gauge transform of W, biases along, in the SVD gauge: apart by"]


def test_measurements_of_rounding_vary_with_the_seed() -> None:
    first, second = (stiefel_geo.certify([SHAPE], seed) for seed in (0, 1))
    agree = [a for a, b in zip(first, second, strict=True) if a.measured == b.measured]
    # A few units in the last place, as of singular values that are 1, are whole numbers and may well agree.
    exact = [a.claim for a in agree if not 0 < a.measured <= 8 * torch.finfo(torch.float64).eps]
    assert exact == [
        "100 steps on gradients × powers of two: frames apart",
        "a step on the gradient λW: largest change of an entry",
        "100 steps with weight decay 0 and 10: frames apart",
    ]


def test_a_seed_gives_the_same_measurements_for_one_proposition_as_for_all() -> None:
    alone = stiefel_geo.certify([SHAPE], 3, propositions=[3])
    assert alone == [c for c in stiefel_geo.certify([SHAPE], 3, propositions=[1, 3]) if c.proposition == 3]


@pytest.mark.parametrize("relation", ["≤", "≥"])
def test_a_measurement_that_is_not_a_number_does_not_hold(relation: str) -> None:
    certificate = Certificate(1, "claim", math.nan, 1.0, 4, 2, 0, relation)
    assert not certificate.holds
    assert certificate.as_dict()["measured"] is None


@pytest.mark.parametrize(("relation", "expected"), [("≤", [True, True, False]), ("≥", [False, True, True])])
def test_holds_compares_the_measurement_with_the_bound(relation: str, expected: list[bool]) -> None:
    assert [Certificate(1, "claim", x, 1.0, 4, 2, 0, relation).holds for x in (0.5, 1.0, 1.5)] == expected


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_the_worst_of_some_measurements_is_not_a_number_if_one_is_not(values: list[float]) -> None:
    assert math.isnan(worst(values))


@pytest.mark.parametrize("shape", [(16, 1), (16, 3), (4, 8)])
def test_certify_refuses_shapes_that_are_no_heads(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="r ≥ 2 and d a multiple of r"):
        stiefel_geo.certify([shape])


def test_the_table_shows_the_measurement_nearest_to_its_bound() -> None:
    rows = [Certificate(2, "claim", x, 1.0, d, 2, 0) for x, d in ((0.25, 4), (0.75, 8), (0.5, 16))]
    assert markdown(rows).splitlines()[2:] == ["| 2 | claim | 0.75 | ≤ 1 | 8×2, seed 0 | 3/3 |"]


def test_the_table_is_markdown_with_one_cell_a_column() -> None:
    assert {line.count("|") for line in markdown(stiefel_geo.certify([SHAPE])).splitlines()} == {7}


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "CHECKS", {3: certificates.CHECKS[3]})
    monkeypatch.setattr(
        certificates.certify, "__kwdefaults__", {**(certificates.certify.__kwdefaults__ or {}), "propositions": (3,)}
    )


@pytest.mark.usefixtures("few_checks")
def test_the_command_writes_every_certificate_as_json_and_exits_with_0(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert __main__.main(["--json", str(file), "--seed", "2", "--shapes", "16x4", "8x8"]) == 0
    expected = [c.as_dict() for c in stiefel_geo.certify([(16, 4), (8, 8)], 2, propositions=[3])]
    assert json.loads(file.read_text()) == expected
    assert {"proposition", "claim", "measured", "bound", "holds", "d", "r", "seed"} <= expected[0].keys()


def test_the_command_exits_with_1_and_names_the_certificate_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Certificate(2, "one is at most zero", 1.0, 0.0, 4, 2, 0)
    monkeypatch.setattr(__main__, "certify", lambda shapes, seed: [failing])
    assert __main__.main([]) == 1
    assert "FAILED: proposition 2 at 4×2: one is at most zero" in capsys.readouterr().out


def test_the_command_refuses_a_json_file_in_a_folder_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["--json", str(tmp_path / "missing" / "out.json")])
    assert "--json needs a folder that exists" in capsys.readouterr().err
