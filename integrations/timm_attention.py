"""The table: attention class → where its query and key rows are, and whether only W_Q W_Kᵀ matters there."""

from collections.abc import Callable

from torch import nn

from stiefel_geo.layouts import Layout, class_name, register


def register_attention(cls: type[nn.Module], layout: Layout) -> None:
    """Let `patch` handle another attention class.

        class MyAttention(nn.Module):
            def __init__(self, dim, heads):
                self.heads = heads
                self.to_q = nn.Linear(dim, dim)
                self.to_kv = nn.Linear(dim, 2 * dim)   # rows: all heads of k, then of v
                ...

        register_attention(MyAttention, Layout({"to_q": "q", "to_kv": "k v"}, heads="heads", plain=True))

    `plain=True` only if the logits are q·k and nothing else uses q or k (no norm, rotary embedding, or pooling
    between); when in doubt leave it out: the patch is lossless either way. Subclasses are covered too.
    """
    register(class_name(cls), layout)


def without(*names: str) -> Callable[[nn.Module], bool]:
    """True for instances on which every named module is absent or an Identity."""
    return lambda module: all(isinstance(getattr(module, name, None), nn.Identity | None) for name in names)


FUSED = {"qkv": "q k v"}
SEPARATE = {"q_proj": "q", "k_proj": "k"}
NO_NORM = without("q_norm", "k_norm")

TABLE: dict[str, Layout] = {
    "timm.layers.attention.Attention": Layout(FUSED, plain=NO_NORM),
    "timm.layers.attention.AttentionRope": Layout(FUSED | SEPARATE, kv_heads="num_kv_heads"),
    "timm.models.eva.EvaAttention": Layout(FUSED | SEPARATE),
}
for _name, _layout in TABLE.items():
    register(_name, _layout)
