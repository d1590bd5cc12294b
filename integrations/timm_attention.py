"""The table: attention class → where its query and key rows are, and whether only W_Q W_Kᵀ matters there."""

from collections.abc import Callable

from torch import nn

from stiefel_geo.layouts import Layout, Order, class_name, register


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


def order(attribute: str, true: str, false: str) -> Callable[[nn.Module], str]:
    """The order of rows that a flag of the module chooses."""
    return lambda module: true if getattr(module, attribute) else false


def double(attribute: str) -> Callable[[nn.Module], int]:
    return lambda module: 2 * int(getattr(module, attribute))


QKV: dict[str, Order] = {"qkv": "q k v"}
Q_K: dict[str, Order] = {"q": "q", "k": "k"}
Q_KV: dict[str, Order] = {"q": "q", "kv": "k v"}
Q_PROJ_K_PROJ: dict[str, Order] = {"q_proj": "q", "k_proj": "k"}
PER_HEAD: dict[str, Order] = {"qkv": "(q k v)"}
HEAD_FIRST: dict[str, Order] = {"qkv": order("head_first", "(q k v)", "q k v")}
NO_NORM = without("q_norm", "k_norm")

# Classes of timm 1.0.31, below "timm.". Plain logits are canonical, all else is polar.
TABLE: dict[str, Layout] = {
    # one weight, rows [q | k | v], the logits plain q·k (relative position biases are added to them)
    "layers.attention.Attention": Layout(QKV, plain=NO_NORM),
    "models.beit.Attention": Layout(QKV, plain=True, biases={"q": "q_bias"}),  # k_bias is a buffer of zeros
    "models.cait.TalkingHeadAttn": Layout(QKV, plain=True),  # logits of the heads are mixed afterwards
    "models.convit.MHSA": Layout(QKV, plain=True),
    "models.davit.WindowAttention": Layout(QKV, plain=True),
    "models.fastvit.Attention": Layout(QKV, plain=True),
    "models.hiera.MaskUnitAttention": Layout(QKV, "heads", plain=lambda m: m.q_stride == 1),  # else max-pooled q
    "models.hieradet_sam2.MultiScaleAttention": Layout(QKV, plain=lambda m: m.q_pool is None),  # same
    "models.metaformer.Attention": Layout(QKV, plain=True),
    "models.nest.Attention": Layout(QKV, plain=True),
    "models.swin_transformer.WindowAttention": Layout(QKV, plain=True),
    "models.twins.LocallyGroupedAttn": Layout(QKV, plain=True),
    "models.vision_transformer_relpos.RelPosAttention": Layout(QKV, plain=NO_NORM),
    "models.vision_transformer_sam.Attention": Layout(
        QKV, plain=lambda m: NO_NORM(m) and not m.use_rel_pos and m.rope is None
    ),
    "models.visformer.Attention": Layout(QKV, plain=True),
    "models.volo.Attention": Layout(QKV, plain=True),
    # the same rows, but something else meets q or k
    "layers.attention.AttentionRope": Layout(QKV | Q_PROJ_K_PROJ, kv_heads="num_kv_heads"),  # rotary embedding
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
    "layers.attention2d.Attention2d": Layout(HEAD_FIRST, plain=True),
    "layers.diff_attention.DiffAttention": Layout(QKV, double("num_heads"), width="head_dim", plain=NO_NORM),
    "layers.lambda_layer.LambdaLayer": Layout(QKV, kv_heads=1, width="dim_qk"),  # one k; BatchNorm, softmax of k
    "models.convit.GPSA": Layout({"qk": "q k"}, plain=True),
    "models.cpubone.ConvAttention": Layout({"pwise": "(q k v)"}, plain=True),
    "models.efficientformer.Attention": Layout(PER_HEAD, width="key_dim", plain=True),
    "models.efficientvit_mit.LiteMLA": Layout(  # ReLU features of q and k, mixed over scales
        {"qkv.conv": "(q k v)"}, lambda m: m.qkv.conv.out_channels // (3 * m.dim)
    ),
    "models.gcvit.WindowAttentionGlobal": Layout(  # in global blocks q is a feature map without a projection
        {"qkv": order("use_global", "k v", "q k v")}, plain=True
    ),
    "models.levit.Attention": Layout({"qkv.linear": "(q k v)"}, width="key_dim"),  # BatchNorm
    "models.lowformer.ConvAttention": Layout({"pwise": "(q k v)"}, plain=True),
    "models.maxxvit.Attention2d": Layout(HEAD_FIRST, plain=True),
    "models.maxxvit.AttentionCl": Layout(HEAD_FIRST, plain=True),
    "models.mobilevit.LinearSelfAttention": Layout(  # one row of scores, no q·k
        {"qkv_proj": "q k v"}, 1, width=1, k_width="embed_dim"
    ),
    "models.tiny_vit.Attention": Layout(PER_HEAD, width="key_dim", plain=True),
    "models.tnt.Attention": Layout({"qk": "q k"}, plain=True),
    "models.vision_transformer.ParallelScalingBlock": Layout(
        {"in_proj": "mlp q k v"}, width="head_dim", ahead=lambda m: m.in_split[0], plain=NO_NORM
    ),
    "models.vision_transformer.DiffParallelScalingBlock": Layout(
        {"in_proj": "mlp q k v"},
        double("num_heads"),
        width="head_dim",
        ahead=lambda m: m.in_split[0],
        plain=NO_NORM,
    ),
    # several weights
    "layers.attention_pool.AttentionPoolLatent": Layout(Q_KV, plain=NO_NORM),
    "layers.attention_pool2d.AttentionPool2d": Layout(QKV | Q_K, plain=True),
    "layers.attention_pool2d.RotAttentionPool2d": Layout(QKV | Q_K),  # rotary embedding
    "layers.attention2d.MultiQueryAttention2d": Layout(  # all heads share one k, so that no gauge is a head's own
        {"query.proj": "q", "key.proj": "k"}, kv_heads=1
    ),
    "layers.halo_attn.HaloAttn": Layout({"q": "q", "kv": "(k v)"}, width="dim_head_qk"),  # q in position logits
    "layers.non_local_attn.NonLocalAttn": Layout({"t": "q", "p": "k"}, 1, plain=True),
    "layers.other_pool.SimPool1d": Layout(Q_K, plain=NO_NORM),
    "layers.other_pool.SimPool2d": Layout(Q_K, plain=NO_NORM),
    "models.cait.ClassAttn": Layout(Q_K, plain=True),
    "models.crossvit.CrossAttention": Layout({"wq": "q", "wk": "k"}, plain=True),
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
    "models.nextvit.EfficientAttention": Layout(Q_K, plain=True),
    "models.pvt_v2.Attention": Layout(Q_KV, plain=True),
    "models.swiftformer.EfficientAdditiveAttention": Layout(  # normalised, no q·k
        {"to_query": "q", "to_key": "k"}, 1
    ),
    "models.twins.GlobalSubSampleAttn": Layout(Q_KV, plain=True),
    "models.volo.ClassAttention": Layout(Q_KV, plain=True),
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
    "layers.bilinear_attn_transform.BilinearAttnTransform",
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
    Layout(
        {"in_proj_weight": "q k v", "q_proj_weight": "q", "k_proj_weight": "k"},
        plain=lambda module: module.in_proj_weight is not None and module.bias_k is None,
    ),
)
