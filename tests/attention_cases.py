"""One small architecture for each attention class of timm, and the rows of its first module as literal numbers.

`rows` says for the first module of the class what stands where, checked against its constructor and `forward`:
"q 3x32, k 3x32, v 96" is three query heads of 32 rows, three key heads, 96 rows of values; "4 * (q 1x16, k 1x16,
v 32)" is that order four times, once per head. It is what `integrations/timm_attention.py` must find.
"""

import re
from dataclasses import dataclass
from typing import Any

import timm
import torch
from patch_cases import randomise_
from torch import Tensor, nn

from stiefel_geo.layouts import class_name


@dataclass(frozen=True)
class Case:
    cls: str  # below "timm."
    architecture: str
    size: int
    overrides: dict[str, Any]
    rows: dict[str, str]

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The architecture with randomised weights and attention strong enough to show in the output."""
        torch.manual_seed(0)
        model = randomise_(timm.create_model(self.architecture, num_classes=4, **self.overrides))
        return model.to(dtype).eval()

    def images(self, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(2, 3, self.size, self.size, generator=generator, dtype=torch.float64).to(dtype)

    def first(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Name and first module of the class."""
        return next((n, m) for n, m in model.named_modules() if class_name(type(m)) == f"timm.{self.cls}")


def heads(weight: Tensor, spec: str) -> list[tuple[str, Tensor]]:
    """(role, rows) of every head in the order of the weight's rows; other rows have their own word as role."""
    repeat = int(spec.split(" * ")[0]) if " * " in spec else 1
    words = re.findall(r"(\w+) (?:(\d+)x)?(\d+)", spec.split(" * ")[-1])
    pieces = [(role, int(width)) for role, count, width in words for _ in range(int(count or 1))] * repeat
    cut = weight.detach().flatten(1).split([width for _, width in pieces])
    return [(role, piece) for (role, _), piece in zip(pieces, cut, strict=True)]


CASES = [
    Case("layers.attention.Attention", "test_vit", 64, {"img_size": 64, "depth": 1}, {"qkv": "q 2x32, k 2x32, v 64"}),
    Case(
        "layers.attention.AttentionRope",
        "vit_pe_spatial_tiny_patch16_512",
        64,
        {"img_size": 64, "depth": 1},
        {"qkv": "q 3x64, k 3x64, v 192"},
    ),
    Case(
        "models.cait.ClassAttn",
        "xcit_nano_12_p8_224",
        64,
        {"img_size": 64, "depth": 1},
        {"q": "q 4x32", "k": "k 4x32"},
    ),
    Case(
        "models.eva.EvaAttention",
        "vit_tiny_patch16_dinov3_qkvb",
        64,
        {"img_size": 64, "depth": 1},
        {"qkv": "q 3x64, k 3x64, v 192"},
    ),
    Case(
        "models.maxxvit.AttentionCl",
        "test_maxvit",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1)},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case("models.xcit.XCA", "xcit_nano_12_p8_224", 64, {"img_size": 64, "depth": 1}, {"qkv": "q 4x32, k 4x32, v 128"}),
    Case(
        "layers.attention_pool.AttentionPoolLatent",
        "test_vit3",
        64,
        {"img_size": 64, "depth": 1},
        {"q": "q 3x32", "kv": "k 3x32, v 96"},
    ),
    Case(
        "models.maxxvit.Attention2d",
        "test_coatnet",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1)},
        {"qkv": "2 * (q 1x32, k 1x32, v 32)"},
    ),
    Case("models.levit.Attention", "levit_128s", 128, {"img_size": 128}, {"qkv.linear": "4 * (q 1x16, k 1x16, v 32)"}),
    Case(
        "models.levit.AttentionDownsample",
        "levit_128s",
        128,
        {"img_size": 128},
        {"q.ln.linear": "q 8x16", "kv.linear": "8 * (k 1x16, v 64)"},
    ),
    Case(
        "models.swin_transformer_v2_cr.WindowMultiHeadAttention",
        "swinv2_cr_tiny_224",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 32, "num_heads": (1, 2, 4, 8)},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case(
        "models.vision_transformer_relpos.RelPosAttention",
        "test_vit_relpos",
        64,
        {"img_size": 64, "depth": 1},
        {"qkv": "q 3x32, k 3x32, v 96"},
    ),
    Case(
        "models.swin_transformer_v2.WindowAttention",
        "swinv2_tiny_window16_256",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 32, "num_heads": (1, 2, 4, 8)},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case(
        "models.crossvit.CrossAttention",
        "crossvit_tiny_240",
        240,
        {"depth": ((1, 1, 0),)},
        {"wq": "q 3x64", "wk": "k 3x64"},
    ),
    Case("models.volo.Attention", "volo_d1_224", 64, {"img_size": 64}, {"qkv": "q 12x32, k 12x32, v 384"}),
    Case("models.volo.ClassAttention", "volo_d1_224", 64, {"img_size": 64}, {"q": "q 12x32", "kv": "k 12x32, v 384"}),
    Case(
        "models.cait.TalkingHeadAttn",
        "cait_xxs24_224",
        64,
        {"img_size": 64, "depth": 1},
        {"qkv": "q 4x48, k 4x48, v 192"},
    ),
    Case("models.cpubone.ConvAttention", "cpubone_nano", 64, {}, {"pwise": "q 1x48, k 1x48, v 48"}),
    Case("models.fastvit.Attention", "fastvit_mci0", 64, {"layers": (1, 1, 1, 1)}, {"qkv": "q 16x32, k 16x32, v 512"}),
    Case("models.iformer.SHMA", "iformer_t", 224, {}, {"q.c": "q 1x64", "k.c": "k 1x64"}),
    Case(
        "models.swin_transformer.WindowAttention",
        "swin_tiny_patch4_window7_224",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 32, "num_heads": (1, 2, 4, 8)},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case("layers.halo_attn.HaloAttn", "halonet_h1", 256, {}, {"q": "q 8x8", "kv": "8 * (k 1x8, v 8)"}),
    Case(
        "models.coat.FactorAttnConvRelPosEnc",
        "coat_tiny",
        64,
        {"img_size": 64, "serial_depths": (1, 1, 1, 1), "parallel_depth": 1},
        {"qkv": "q 8x19, k 8x19, v 152"},
    ),
    Case(
        "models.davit.WindowAttention",
        "davit_tiny",
        64,
        {"depths": (1, 1, 1, 1), "embed_dims": (32, 64, 128, 256), "num_heads": (1, 2, 4, 8)},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case(
        "models.hiera.MaskUnitAttention",
        "hiera_tiny_224",
        64,
        {"img_size": 64, "stages": (1, 1, 1, 1), "embed_dim": 32},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case("models.mvitv2.MultiScaleAttention", "mvitv2_tiny", 64, {"img_size": 64}, {"qkv": "q 1x96, k 1x96, v 96"}),
    Case(
        "layers.attention2d.MultiQueryAttention2d",
        "mobilenetv4_hybrid_medium_075",
        64,
        {},
        {"query.proj": "q 4x64", "key.proj": "k 1x64"},
    ),
    Case(
        "models.beit.Attention",
        "beit_base_patch16_224",
        64,
        {"img_size": 64, "depth": 1, "embed_dim": 96, "num_heads": 3},
        {"qkv": "q 3x32, k 3x32, v 96"},
    ),
    Case(
        "models.efficientvit_mit.LiteMLA",
        "efficientvit_b0",
        64,
        {"depths": (1, 1, 1, 1)},
        {"qkv.conv": "4 * (q 1x16, k 1x16, v 16)"},
    ),
    Case("models.mobilevit.LinearSelfAttention", "mobilevitv2_050", 128, {}, {"qkv_proj": "q 1x1, k 1x64, v 64"}),
    Case("models.pvt_v2.Attention", "pvt_v2_b0", 64, {"depths": (1, 1, 1, 1)}, {"q": "q 1x32", "kv": "k 1x32, v 32"}),
    Case(
        "layers.bottleneck_attn.BottleneckAttn",
        "eca_botnext26ts_256",
        64,
        {"img_size": 64},
        {"qkv": "q 4x16, k 4x16, v 256"},
    ),
    Case(
        "models.davit.ChannelAttention",
        "davit_tiny",
        64,
        {"depths": (1, 1, 1, 1), "embed_dims": (32, 64, 128, 256), "num_heads": (1, 2, 4, 8)},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case(
        "models.efficientvit_msra.CascadedGroupAttention",
        "efficientvit_m0",
        128,
        {"img_size": 128},
        {
            "qkvs.0.conv": "q 1x16, k 1x16, v 16",
            "qkvs.1.conv": "q 1x16, k 1x16, v 16",
            "qkvs.2.conv": "q 1x16, k 1x16, v 16",
            "qkvs.3.conv": "q 1x16, k 1x16, v 16",
        },
    ),
    Case("models.lowformer.ConvAttention", "lowformer_b0", 64, {}, {"pwise": "2 * (q 1x32, k 1x32, v 32)"}),
    Case("models.nest.Attention", "nest_tiny", 64, {"img_size": 64}, {"qkv": "q 3x32, k 3x32, v 96"}),
    Case(
        "models.twins.GlobalSubSampleAttn",
        "twins_svt_small",
        64,
        {"img_size": 64, "depths": (1, 2, 1, 1)},
        {"q": "q 4x32", "kv": "k 4x32, v 128"},
    ),
    Case(
        "layers.attention_pool2d.AttentionPool2d",
        "resnet50_clip",
        64,
        {"img_size": 64},
        {"q": "q 32x64", "k": "k 32x64"},
    ),
    Case(
        "models.edgenext.CrossCovarianceAttn",
        "edgenext_xx_small",
        64,
        {"depths": (1, 1, 1, 1)},
        {"qkv": "q 4x12, k 4x12, v 48"},
    ),
    Case("models.gcvit.WindowAttentionGlobal", "gcvit_xxtiny", 64, {"img_size": 64}, {"qkv": "q 2x32, k 2x32, v 64"}),
    Case("models.hieradet_sam2.MultiScaleAttention", "sam2_hiera_tiny", 64, {}, {"qkv": "q 1x96, k 1x96, v 96"}),
    Case(
        "models.tiny_vit.Attention",
        "tiny_vit_5m_224",
        64,
        {"depths": (1, 1, 1, 1)},
        {"qkv": "4 * (q 1x32, k 1x32, v 32)"},
    ),
    Case(
        "layers.lambda_layer.LambdaLayer",
        "lambda_resnet26t",
        128,
        {"img_size": 128},
        {"qkv": "q 4x16, k 1x16, v 64"},
    ),
    Case(
        "models.efficientformer_v2.Attention2d",
        "efficientformerv2_s0",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1)},
        {"q.conv": "q 8x32", "k.conv": "k 8x32"},
    ),
    Case(
        "models.efficientformer_v2.Attention2dDownsample",
        "efficientformerv2_s0",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1)},
        {"q.proj.conv": "q 8x16", "k.conv": "k 8x16"},
    ),
    Case(
        "models.gemma4_vit.Gemma4Attention",
        "gemma4_vit_167m",
        64,
        {"img_size": 64, "depth": 1, "embed_dim": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32},
        {"q_proj.linear": "q 2x32", "k_proj.linear": "k 2x32"},
    ),
    Case("models.metaformer.Attention", "caformer_s18", 64, {}, {"qkv": "q 10x32, k 10x32, v 320"}),
    Case("models.shvit.SHSA", "shvit_s1", 128, {}, {"qkv.c": "q 1x16, k 1x16, v 48"}),
    Case(
        "models.swiftformer.EfficientAdditiveAttention",
        "swiftformer_xs",
        64,
        {"img_size": 64, "layers": (1, 1, 1, 1)},
        {"to_query": "q 1x48", "to_key": "k 1x48"},
    ),
    Case(
        "models.vision_transformer.ParallelScalingBlock",
        "vit_pwee_patch16_reg1_gap_256",
        64,
        {"img_size": 64, "depth": 1},
        {"in_proj": "mlp 1280, q 4x64, k 4x64, v 256"},
    ),
    Case(
        "models.vision_transformer_sam.Attention",
        "samvit_base_patch16_224",
        64,
        {"img_size": 64, "depth": 1, "embed_dim": 96, "num_heads": 3, "global_attn_indexes": ()},
        {"qkv": "q 3x32, k 3x32, v 96"},
    ),
    Case(
        "models.convit.GPSA",
        "convit_tiny",
        64,
        {"img_size": 64, "depth": 4, "local_up_to_layer": 3},
        {"qk": "q 4x48, k 4x48"},
    ),
    Case(
        "models.convit.MHSA",
        "convit_tiny",
        64,
        {"img_size": 64, "depth": 4, "local_up_to_layer": 3},
        {"qkv": "q 4x48, k 4x48, v 192"},
    ),
    Case(
        "models.efficientformer.Attention",
        "efficientformer_l1",
        224,
        {"depths": (1, 1, 1, 1)},
        {"qkv": "8 * (q 1x32, k 1x32, v 128)"},
    ),
    Case(
        "models.nextvit.EfficientAttention",
        "nextvit_small",
        64,
        {"depths": (1, 1, 5, 1)},
        {"q": "q 6x32", "k": "k 6x32"},
    ),
    Case("models.tnt.Attention", "tnt_s_legacy_patch16_224", 64, {"img_size": 64, "depth": 1}, {"qk": "q 4x6, k 4x6"}),
    Case(
        "models.twins.LocallyGroupedAttn",
        "twins_svt_small",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1)},
        {"qkv": "q 2x32, k 2x32, v 64"},
    ),
    Case(
        "layers.diff_attention.DiffAttention",
        "vit_dwee_patch16_reg1_gap_256",
        64,
        {"img_size": 64, "depth": 1},
        {"qkv": "q 8x32, k 8x32, v 256"},
    ),
    Case("models.csatv2.SpatialTransformerBlock", "csatv2", 64, {}, {}),
    Case(
        "models.davit.ChannelAttentionV2",
        "davit_base_fl",
        64,
        {"depths": (1, 1, 1, 1), "embed_dims": (32, 64, 128, 256), "num_heads": (1, 2, 4, 8)},
        {"qkv": "q 1x32, k 1x32, v 32"},
    ),
    Case(
        "models.visformer.Attention",
        "visformer_tiny",
        64,
        {"img_size": 64, "depth": 1},
        {"qkv": "q 3x64, k 3x64, v 192"},
    ),
    Case(
        "models.vision_transformer.DiffParallelScalingBlock",
        "vit_dpwee_patch16_reg1_gap_256",
        64,
        {"img_size": 64, "depth": 1},
        {"in_proj": "mlp 1280, q 8x32, k 8x32, v 256"},
    ),
]
