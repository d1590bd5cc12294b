"""Tiny random models of transformers' families: the patch is lossless, and the rows it takes for heads are heads."""

import pytest
import torch
from support.transformers_models import FAMILIES, outputs, tiny
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.attention.layouts import find
from stiefel_geo.attention.projections import Projection, projections_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, at import and in forward
PROJECTED = "no query or key projection"
# Logits that a sign of one head's queries and keys changes all the same: pooled queries, a part of the keys shared.
NOT_ODD = {"sam2", "deepseek_v3"}


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_patching_leaves_the_outputs_as_they_are(family: str) -> None:
    model = tiny(family)
    before = outputs(model, family)
    keys = list(model.state_dict())
    report = stiefel_geo.patch(model)
    assert [entry for entry in report.skipped if PROJECTED not in entry.reason] == []
    assert largest(outputs(model, family) - before) < 1e-10 * largest(before)
    assert list(stiefel_geo.plain_state_dict(model)) == keys
    stiefel_geo.unpatch(model)
    assert largest(outputs(model, family) - before) < 1e-10 * largest(before)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NOT_ODD))
def test_the_rows_found_are_the_heads_of_queries_and_keys(family: str) -> None:
    """q·k is odd in each, so the sign of one query head and its keys together is nothing, of one alone it is not."""
    model = without_biases(tiny(family))
    before = outputs(model, family)
    for plan in plans(model):
        negate_last_head(plan, "qk")
    assert largest(outputs(model, family) - before) < 1e-5 * largest(before)  # rotary embeddings are float32
    for plan in plans(model):
        negate_last_head(plan, "k")
    assert largest(outputs(model, family) - before) > 1e-3 * largest(before)


def without_biases(model: nn.Module) -> nn.Module:
    for name, p in model.named_parameters():
        if name.endswith("bias") and p.dim() == 1:
            p.data.zero_()
    return model


def plans(model: nn.Module) -> list[list[Projection]]:
    found = [(module, find(module)) for module in model.modules()]
    return [projections_of(module) for module, known in found if known is not None and not known[1].skip]


def negate_last_head(plan: list[Projection], roles: str) -> None:
    """In every projection of the module: the last key head, and the query heads that meet it."""
    counts = {role: max(p.roles.count(role) for p in plan) for role in "qk"}
    of_one = {"k": 1, "q": max(counts["q"] // max(counts["k"], 1), 1)}
    for p in plan:
        weight = getattr(p.owner, p.tensor)
        stacks, rest = p.rows.split(weight.detach().flatten(1))
        for stack, names in zip(stacks, p.rows.roles, strict=True):
            for role in roles:
                here = [i for i, name in enumerate(names) if name == role]
                stack[here[len(here) - of_one[role] :] if here else []] *= -1
        weight.data.copy_(p.rows.join([stack.mT for stack in stacks], rest).reshape(weight.shape))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "bloom", "falcon_7b", "deepseek_v3"])
def test_generation_with_and_without_a_cache_gives_the_same_tokens(family: str) -> None:
    model = tiny(family, use_cache=True)
    ids = torch.arange(3, 9).view(1, 6)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **how)
    stiefel_geo.patch(model)
    assert model.generate(ids, **how).tolist() == before.tolist()
    assert model.generate(ids, use_cache=False, **how).tolist() == before.tolist()


@pytest.mark.parametrize("kind", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["vit", "bert", "llama", "gpt2"])
def test_every_implementation_of_attention_runs_on_patched_weights(family: str, kind: str) -> None:
    model = tiny(family)
    if kind == "flex_attention" and not model._supports_flex_attn:
        pytest.skip(f"transformers has no flex attention for {family}")
    model.set_attn_implementation(kind)
    if kind == "flex_attention":
        model = model.float()
    before = outputs(model, family)
    stiefel_geo.patch(model)
    tolerance = 1e-5 if kind == "flex_attention" else 1e-10
    assert largest(outputs(model, family) - before) < tolerance * largest(before)
