"""The table: attention class → where its query and key rows are."""

from collections.abc import Callable
from typing import Any

from torch import nn

from stiefel_geo.attention.layouts import Layout, Order, register


def order(attribute: str, true: str, false: str) -> Callable[[nn.Module], str]:
    """The order of rows that a flag of the module chooses."""
    return lambda module: true if getattr(module, attribute) else false


def key_heads(module: Any) -> int:
    """Older timm has no grouped keys: every query head has its own."""
    return int(getattr(module, "num_kv_heads", module.num_heads))


def double(attribute: str) -> Callable[[nn.Module], int]:
    """Twice the number that the module keeps under this name."""
    return lambda module: 2 * int(getattr(module, attribute))


QKV: dict[str, Order] = {"qkv": "q k v"}
Q_K: dict[str, Order] = {"q": "q", "k": "k"}
Q_KV: dict[str, Order] = {"q": "q", "kv": "k v"}
Q_PROJ_K_PROJ: dict[str, Order] = {"q_proj": "q", "k_proj": "k"}
PER_HEAD: dict[str, Order] = {"qkv": "(q k v)"}
HEAD_FIRST: dict[str, Order] = {"qkv": order("head_first", "(q k v)", "q k v")}

# Classes of timm 1.0.31, below "timm.".
TABLE: dict[str, Layout] = {
    # one weight, rows [q | k | v]
    "layers.attention.Attention": Layout(QKV),
    "models.beit.Attention": Layout(QKV),  # k_bias is a buffer of zeros
    "models.cait.TalkingHeadAttn": Layout(QKV),  # logits of the heads are mixed afterwards
    "models.convit.MHSA": Layout(QKV),
    "models.davit.WindowAttention": Layout(QKV),
    "models.fastvit.Attention": Layout(QKV),
    "models.hiera.MaskUnitAttention": Layout(QKV, "heads"),  # else max-pooled q
    "models.hieradet_sam2.MultiScaleAttention": Layout(QKV),  # same
    "models.metaformer.Attention": Layout(QKV),
    "models.nest.Attention": Layout(QKV),
    "models.swin_transformer.WindowAttention": Layout(QKV),
    "models.twins.LocallyGroupedAttn": Layout(QKV),
    "models.vision_transformer_relpos.RelPosAttention": Layout(QKV),
    "models.vision_transformer_sam.Attention": Layout(QKV),
    "models.visformer.Attention": Layout(QKV),
    "models.volo.Attention": Layout(QKV),
    "layers.attention.AttentionRope": Layout(QKV | Q_PROJ_K_PROJ, kv_heads=key_heads),  # rotary embedding
    "layers.bottleneck_attn.BottleneckAttn": Layout(QKV, width="dim_head_qk"),  # q also in the position logits
    "models.coat.FactorAttnConvRelPosEnc": Layout(QKV),  # softmax of k over tokens, q in the position term
    "models.davit.ChannelAttention": Layout(QKV),  # softmax(kᵀv) applied to q
    "models.davit.ChannelAttentionV2": Layout(QKV, "groups"),  # logits between channels
    "models.edgenext.CrossCovarianceAttn": Layout(QKV),  # logits between channels, normalised
    "models.eva.EvaAttention": Layout(QKV | Q_PROJ_K_PROJ),  # rotary embedding, if the model passes one
    "models.mvitv2.MultiScaleAttention": Layout(QKV),  # pooled, normalised, q added to the output
    "models.shvit.SHSA": Layout({"qkv.c": "q k v"}, 1, width="qk_dim"),  # BatchNorm
    "models.swin_transformer_v2.WindowAttention": Layout(QKV),  # cosine logits
    "models.swin_transformer_v2_cr.WindowMultiHeadAttention": Layout(QKV),  # cosine logits
    "models.xcit.XCA": Layout(QKV),  # logits between channels, normalised
    # one weight, other rows
    "layers.attention2d.Attention2d": Layout(HEAD_FIRST),
    "layers.diff_attention.DiffAttention": Layout(QKV, double("num_heads"), width="head_dim"),
    "layers.lambda_layer.LambdaLayer": Layout(QKV, kv_heads=1, width="dim_qk"),  # one k; BatchNorm, softmax of k
    "models.convit.GPSA": Layout({"qk": "q k"}),
    "models.cpubone.ConvAttention": Layout({"pwise": "(q k v)"}),
    "models.efficientformer.Attention": Layout(PER_HEAD, width="key_dim"),
    "models.efficientvit_mit.LiteMLA": Layout(  # ReLU features of q and k, mixed over scales
        {"qkv.conv": "(q k v)"}, lambda m: m.qkv.conv.out_channels // (3 * m.dim)
    ),
    "models.gcvit.WindowAttentionGlobal": Layout(  # in global blocks q is a feature map without a projection
        {"qkv": order("use_global", "k v", "q k v")}
    ),
    "models.levit.Attention": Layout({"qkv.linear": "(q k v)"}, width="key_dim"),  # BatchNorm
    "models.lowformer.ConvAttention": Layout({"pwise": "(q k v)"}),
    "models.maxxvit.Attention2d": Layout(HEAD_FIRST),
    "models.maxxvit.AttentionCl": Layout(HEAD_FIRST),
    "models.mobilevit.LinearSelfAttention": Layout(  # one row of scores, no q·k
        {"qkv_proj": "q k v"}, 1, width=1, k_width="embed_dim"
    ),
    "models.tiny_vit.Attention": Layout(PER_HEAD, width="key_dim"),
    "models.tnt.Attention": Layout({"qk": "q k"}),
    "models.vision_transformer.ParallelScalingBlock": Layout(
        {"in_proj": "mlp q k v"}, width="head_dim", ahead=lambda m: m.in_split[0]
    ),
    "models.vision_transformer.DiffParallelScalingBlock": Layout(
        {"in_proj": "mlp q k v"},
        double("num_heads"),
        width="head_dim",
        ahead=lambda m: m.in_split[0],
    ),
    # several weights
    "layers.attention_pool.AttentionPoolLatent": Layout(Q_KV),
    "layers.attention_pool2d.AttentionPool2d": Layout(QKV | Q_K),
    "layers.attention_pool2d.RotAttentionPool2d": Layout(QKV | Q_K),  # rotary embedding
    "layers.attention2d.MultiQueryAttention2d": Layout(  # all heads share one k, so that no gauge is a head's own
        {"query.proj": "q", "key.proj": "k"}, kv_heads=1
    ),
    "layers.halo_attn.HaloAttn": Layout({"q": "q", "kv": "(k v)"}, width="dim_head_qk"),  # q in position logits
    "layers.non_local_attn.NonLocalAttn": Layout({"t": "q", "p": "k"}, 1),
    "layers.other_pool.SimPool1d": Layout(Q_K),
    "layers.other_pool.SimPool2d": Layout(Q_K),
    "models.cait.ClassAttn": Layout(Q_K),
    "models.crossvit.CrossAttention": Layout({"wq": "q", "wk": "k"}),
    "models.efficientformer_v2.Attention2d": Layout({"q.conv": "q", "k.conv": "k"}),  # BatchNorm
    "models.efficientformer_v2.Attention2dDownsample": Layout({"q.proj.conv": "q", "k.conv": "k"}),  # BatchNorm
    "models.efficientvit_msra.CascadedGroupAttention": Layout(  # BatchNorm; one weight per head
        {"qkvs.*.conv": "q k v"}, 1, width="key_dim"
    ),
    "models.gemma4_vit.Gemma4Attention": Layout(  # norms and rotary embedding
        {"q_proj.linear": "q", "k_proj.linear": "k"}, kv_heads="num_kv_heads"
    ),
    "models.iformer.SHMA": Layout({"q.c": "q", "k.c": "k"}, 1),  # BatchNorm
    "models.levit.AttentionDownsample": Layout(  # BatchNorm
        {"q.ln.linear": "q", "kv.linear": "(k v)"}, width="key_dim"
    ),
    "models.nextvit.EfficientAttention": Layout(Q_K),
    "models.pvt_v2.Attention": Layout(Q_KV),
    "models.swiftformer.EfficientAdditiveAttention": Layout(  # normalised, no q·k
        {"to_query": "q", "to_key": "k"}, 1
    ),
    "models.twins.GlobalSubSampleAttn": Layout(Q_KV),
    "models.volo.ClassAttention": Layout(Q_KV),
    # projections that do nothing
    "models.csatv2.SpatialTransformerBlock": Layout(
        skip="its output does not depend on W_Q: the input is a LayerNorm of one channel, which is constant"
    ),
}
# Attention by name alone: gates, pooling and local aggregation without queries and keys.
NO_QUERIES = (
    "layers.attention_pool.AttentionPoolPrr",
    "layers.split_attn.SplitAttn",
    "layers.selective_kernel.SelectiveKernelAttn",
    "layers.non_local_attn.BilinearAttnTransform",
    "models.nextvit.ConvAttention",
    "models.volo.OutlookAttention",
)

for _name, _layout in TABLE.items():
    register(f"timm.{_name}", _layout)
for _name in NO_QUERIES:
    register(f"timm.{_name}", Layout(skip="it has no query or key projection"))

# Three forms of one class: in_proj_weight, or three weights where keys or values have another width.
register(
    "torch.nn.modules.activation.MultiheadAttention",
    Layout({"in_proj_weight": "q k v", "q_proj_weight": "q", "k_proj_weight": "k"}),
)
