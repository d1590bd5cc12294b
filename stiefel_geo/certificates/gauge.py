"""Proposition 6, the negative result: gauge directions carry no gradient.

Statement. Plain logits q·k do not change under (W_Q, W_K) → (W_Q A, W_K A⁻ᵀ), A ∈ GL(r), biases along with them.
So for every B ∈ R^{r×r}, and for pure frames every skew B,

    ⟨G_Q, W_Q B⟩ − ⟨G_K, W_K Bᵀ⟩ = 0 :

the loss never pushes along the orbit, so a method gains nothing by removing the gauge. AdamW moves along it
nevertheless, by its element-wise division; frames by the difference of two scalars alone, a query's and a key's:
the share of their first step along the orbit is ½‖S‖·|1/‖g_Q‖ − 1/‖g_K‖|, S = skew(W_QᵀG_Q), g = P_W(G).
In the SVD gauge, W_Q W_Kᵀ = UΣVᵀ, W_Q = U√Σ, W_K = V√Σ with distinct singular values, signs and permutations are
all that is left of it.

Proof. Differentiate the constant loss(W_Q e^{tB}, W_K e^{−tBᵀ}) at t = 0; frames stay frames under A ∈ O(r), that
is for skew B. There it says skew(W_KᵀG_K) = −S, so first steps −ℓg/‖g‖ of equal length ℓ have the part
(W_Q B, W_K B) along the orbit, with B = ½ℓS(1/‖g_K‖ − 1/‖g_Q‖); divide its length √2‖B‖ by √2ℓ. Last, two canonical
forms of one orbit have AᵀΣA = Σ' = A⁻¹ΣA⁻ᵀ, so PΣP = Σ with P = AAᵀ, whence (√Σ P √Σ)² = Σ², √Σ P √Σ = Σ and P = I:
A is orthogonal and AᵀΣA diagonal, for distinct values a signed permutation.
(While training, query and key have a core each, so that scaling one up and the other down remains as well.)

Checked here. A timm `Attention`, B running over the elementary matrices (their skew parts, for frames); the share of
one step that lies along the orbit, without biases: AdamW's after a few steps, the frames' first; a layer and a
gauge-transformed copy put into the SVD gauge, which have to become the same; a signed permutation of that, which has
to leave the outputs.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from .. import diagnostics
from ..attention.patching import frames, patch
from ..stiefel import random_frame, sym
from .attention import Layer, attention, backward, data, heads
from .certificate import Case, Certificate, worst
from .observing import OptimizerFactory

AttentionFactory = Callable[[Case, torch.Generator], Layer]
Spectrum = Callable[[int], Tensor]
WARM_UP = 10  # steps before the one whose direction is judged


def with_biases(case: Case, generator: torch.Generator) -> Layer:
    """The layer certified: the gauge acts on the biases too."""
    return attention(case, generator, qkv_bias=True)


def distinct(r: int) -> Tensor:
    """Singular values of W_Q W_Kᵀ from 2 down to 1, in equal distances."""
    return torch.linspace(2, 1, r, dtype=torch.float64)


def check(
    case: Case,
    make: OptimizerFactory,
    *,
    layer_of: AttentionFactory = with_biases,
    euclidean: OptimizerFactory = torch.optim.AdamW,
    spectrum: Spectrum = distinct,
) -> list[Certificate]:
    """Six certificates. The last three arguments let a test hand in what must fail."""
    generator = case.generator(6)
    layer, (x, y) = layer_of(case, generator), data(case, generator)
    pure = copy.deepcopy(layer)
    patch(pure, core="identity")
    without_bias = _without_bias(layer)
    apart, turned = _in_svd_gauge(layer, x, spectrum(case.r), generator)
    return [
        case.at_most(6, "⟨G_Q, W_Q B⟩ − ⟨G_K, W_K Bᵀ⟩ for all B, relative", _imbalance(layer, x, y, skew=False), 1e-12),
        case.at_most(6, "the same on pure frames, for all skew B", _imbalance(pure, x, y, skew=True), 1e-12),
        case.at_least(6, "share of AdamW's step along the orbit", _drift(without_bias, euclidean, x, y).min(), 1e-2),
        case.at_most(
            6,
            "share of the frames' first step along it: off ½‖S‖·(1/‖g_Q‖ − 1/‖g_K‖) by",
            _off_formula(without_bias, make, x, y),
            1e-6,
        ),
        case.at_most(6, "W and a gauge transform of W, biases along, in the SVD gauge: apart by", apart, 1e-10),
        case.at_most(6, "outputs after a signed permutation in the SVD gauge: changed by", turned, 1e-12),
    ]


def _imbalance(layer: Layer, x: Tensor, y: Tensor, *, skew: bool) -> float:
    """The largest |⟨G_Q, W_Q B⟩ − ⟨G_K, W_K Bᵀ⟩| over the largest |⟨G_Q, W_Q B⟩|, worst of all heads.

    B runs over the elementary matrices, so these are the entries of W_QᵀG_Q and G_KᵀW_K. The bias is the last row
    of its head's matrix, as q = xW_Q + b_Q: the gauge acts on both.
    """
    backward(layer, x, y)
    bias = layer.qkv.bias
    weights, slopes = _query_key(layer)
    W_Q, W_K = torch.cat([weights, torch.stack(heads(layer, bias.detach()))], 2)  # (heads, d+1, r)
    G_Q, G_K = torch.cat([slopes, torch.stack(heads(layer, bias.grad))], 2)
    query, key = W_Q.mT @ G_Q, G_K.mT @ W_K
    if skew:
        query, key = query - query.mT, key - key.mT
    return float(((query - key).abs().amax((1, 2)) / query.abs().amax((1, 2))).max())


def _query_key(layer: Layer) -> tuple[Tensor, Tensor]:
    """Query and key matrices and their gradients, (2, heads, d, r) both: the frames of a patched layer."""
    for _, F in frames(layer):
        return F.detach().unflatten(0, (2, -1)), F.grad.unflatten(0, (2, -1))
    weight = layer.qkv.weight
    return torch.stack(heads(layer, weight.detach())), torch.stack(heads(layer, weight.grad))


def _without_bias(layer: Layer) -> Layer:
    """A copy whose biases are zero and not trained, so that weights alone have the gauge."""
    layer = copy.deepcopy(layer)
    layer.qkv.bias.data.zero_()
    layer.qkv.bias.requires_grad_(False)
    return layer


def _drift(layer: Layer, make: OptimizerFactory, x: Tensor, y: Tensor) -> Tensor:
    """Share of a step along the orbit, by head, after the warm-up."""
    layer = copy.deepcopy(layer)
    optimizer = make(layer.parameters(), lr=1e-4)
    for _ in range(WARM_UP):
        backward(layer, x, y)
        optimizer.step()
    return _share_of_step(layer, optimizer, x, y)


def _share_of_step(layer: Layer, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    before = diagnostics.snapshot(layer)
    backward(layer, x, y)
    optimizer.step()
    shares = diagnostics.gauge_drift(layer, before).values()
    return torch.cat([*shares]) if shares else torch.zeros(1)  # a layer without a gauge has no orbit


def _off_formula(layer: Layer, make: OptimizerFactory, x: Tensor, y: Tensor) -> float:
    """How far the share of the frames' first step, short enough for a linear law, is from ½‖S‖·|1/‖g_Q‖ − 1/‖g_K‖|."""
    layer = copy.deepcopy(layer)
    patch(layer, core="identity")
    backward(layer, x, y)
    weights, slopes = _query_key(layer)  # (2, heads, d, r)
    A = weights.mT @ slopes
    S = torch.linalg.matrix_norm((A[0] - A[0].mT) / 2)
    g = (slopes.square().sum((2, 3)) - sym(A).square().sum((2, 3))).sqrt()
    share = _share_of_step(layer, make(layer.parameters(), lr=1e-8), x, y)
    return float((share - S * (1 / g[0] - 1 / g[1]).abs() / 2).abs().max())


def _in_svd_gauge(layer: Layer, x: Tensor, values: Tensor, generator: torch.Generator) -> tuple[float, float]:
    """How far two points of one orbit are apart in the SVD gauge, and what a signed permutation there changes."""
    first = _with_spectrum(layer, values, generator)
    second = _transformed(first, generator)
    for each in (first, second):
        _to_svd_gauge(each)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    apart = worst(float((p - q).detach().abs().max()) for p, q in pairs)
    with torch.no_grad():
        outputs = first(x)
        _permute(first, generator)
        turned = float((first(x) - outputs).norm() / outputs.norm())
    return apart, turned


@torch.no_grad()
def _to_svd_gauge(layer: Layer) -> None:
    """W_Q W_Kᵀ = U Σ Vᵀ per head: W_Q → U√Σ = W_Q·M, W_K → V√Σ = W_K·M⁻ᵀ, biases alike, in place.

    W_Q = Q₁R₁, W_K = Q₂R₂, R₁R₂ᵀ = AΣBᵀ give U = Q₁A, V = Q₂B, M = R₂ᵀBΣ^{−1/2}, M⁻ᵀ = R₁ᵀAΣ^{−1/2}: neither R is
    inverted. Signs: the largest entry of every column of U is positive.
    """
    W_Q, W_K = heads(layer, layer.qkv.weight)
    (Q_1, R_1), (_, R_2) = torch.linalg.qr(W_Q), torch.linalg.qr(W_K)
    A, S, Bh = torch.linalg.svd(R_1 @ R_2.mT)
    U = Q_1 @ A
    sign = U.gather(1, U.abs().argmax(1, keepdim=True)).sign() / S.sqrt().unsqueeze(1)
    M, M_inverse = R_2.mT @ Bh.mT * sign, R_1.mT @ A * sign
    for rows in (layer.qkv.weight, layer.qkv.bias):
        query, key = heads(layer, rows)
        query.copy_(query @ M)
        key.copy_(key @ M_inverse)


def _with_spectrum(layer: Layer, values: Tensor, generator: torch.Generator) -> Layer:
    """A copy whose W_Q W_Kᵀ has the given singular values in every head."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for role in heads(layer, layer.qkv.weight):
            role.copy_(random_frame(*role.shape, dtype=role.dtype, generator=generator) * values.sqrt())
    return layer


def _transformed(layer: Layer, generator: torch.Generator) -> Layer:
    """A copy with (W_Q A, W_K A⁻ᵀ), biases alike, A of condition number 4."""
    layer = copy.deepcopy(layer)
    left, right = random_frame(2, layer.head_dim, layer.head_dim, dtype=torch.float64, generator=generator)
    values = torch.linspace(0.5, 2, layer.head_dim, dtype=torch.float64)
    with torch.no_grad():
        for rows in (layer.qkv.weight, layer.qkv.bias):
            query, key = heads(layer, rows)
            query.copy_(query @ (left * values @ right))
            key.copy_(key @ (left / values @ right))
    return layer


def _permute(layer: Layer, generator: torch.Generator) -> None:
    """Permute columns of queries and keys, and turn signs over, biases along, in place."""
    order = torch.randperm(layer.head_dim, generator=generator)
    sign = torch.randint(0, 2, (layer.head_dim,), generator=generator).double() * 2 - 1
    for rows in (layer.qkv.weight, layer.qkv.bias):
        for role in heads(layer, rows):
            role.copy_(role[..., order] * sign)
