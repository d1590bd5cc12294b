"""The table of exceptions to `transformers_rule`: classes of transformers whose names do not tell the rows.

By class name, so nothing is imported here. Every order was read from the class's forward in transformers 5.24.
Heads and widths are found as the rule finds them, unless a row says otherwise.
"""

from dataclasses import replace
from functools import partial

from stiefel_geo.attention.layouts import Layout, Order, register

from .transformers_rule import heads, key_heads, width

EQUAL = partial(Layout, heads=heads, kv_heads=key_heads)  # heads of equal width, as many as are stated
FIXED = partial(EQUAL, width=width)  # heads of the width that the module states
QKV = EQUAL({"qkv": "q k v"})
CROSS: dict[str, Order] = {"c_attn": lambda m: "k v" if m.is_cross_attention else "q k v", "q_attn": "q"}
GPT2 = Layout(CROSS, heads, transposed=True)
PER_HEAD = EQUAL({"query_key_value": "(q k v)"})
# Latent attention: frames on the up-projections, where each head is whole rows; the part of a key that all heads
# share (rotary, from kv_a_proj_with_mqa) is no head's own and stays as it is.
LATENT = Layout(
    {"q_proj": "q", "q_b_proj": "q", "q_gate_proj": "(q gate)", "kv_b_proj": "(k v)"},
    "num_heads",
    width="qk_head_dim",
    k_width="qk_nope_head_dim",
)
GATED = FIXED({"q_proj": "(q gate)", "k_proj": "k"})  # per head: its query, then its output gate
RELATIVE = FIXED({"q_proj": "q", "k_proj": "k", "relative_k_proj": "k"})  # keys of relative positions
DISENTANGLED = FIXED({"query_proj": "q", "key_proj": "k", "pos_query_proj": "q", "pos_key_proj": "k"})
GLOBAL = FIXED({"query": "q", "key": "k", "query_global": "q", "key_global": "k"})
TO_KV = EQUAL({"to_q": "q", "to_kv": "k v"})
ONE_HEAD = Layout({"q": "q", "k": "k"}, 1)
CONTENT_AND_POSITION = Layout(
    {name: name[0] for name in ("q_content_proj", "q_pos_proj", "q_pos_sine_proj", "k_content_proj", "k_pos_proj")},
    lambda m: m.hidden_size // m.head_dim,
)


def dab_detr(prefix: str, decoder_heads: str) -> Layout:
    """DAB-DETR projects outside the attention module, in the decoder layer around it."""
    words = ("query_content", "query_pos", "query_pos_sine", "key_content", "key_pos")
    return Layout({f"{prefix}_{word}_proj": "q" if "query" in word else "k" for word in words}, decoder_heads)


def falcon(module: object) -> str:
    """Per group of queries, or per head, or all queries and then the one key and value."""
    new, shared = module.new_decoder_architecture, module.multi_query  # type: ignore[attr-defined]
    return "(q k v)" if new or not shared else "q k v"


# Classes below "transformers.models.", as folder.Class; subclasses are covered by their bases.
ROWS: dict[str, Layout] = {
    # several kinds of rows in one weight
    "bark.BarkSelfAttention": EQUAL({"att_proj": "q k v"}),
    "bloom.BloomAttention": PER_HEAD,
    "codegen.CodeGenAttention": replace(EQUAL({"qkv_proj": "(q v k)"}), groups=4),  # one group per TPU core
    "dbrx.DbrxAttention": EQUAL({"Wqkv": "q k v"}),
    "deberta.DisentangledSelfAttention": Layout(
        {"in_proj": "(q k v)", "pos_proj": "k", "pos_q_proj": "q"}, heads, width="attention_head_size"
    ),
    "decision_transformer.DecisionTransformerGPT2Attention": GPT2,
    "esm.EsmFoldSelfAttention": EQUAL({"proj": "(q k v)"}),
    "esm.EsmFoldInvariantPointAttention": Layout(  # the points' rows are coordinate by coordinate, not head by head
        {"linear_q": "q", "linear_kv": "(k v)"}, heads, width="hidden_dim"
    ),
    "evolla.EvollaSequenceCompressorAttention": TO_KV,
    "falcon.FalconAttention": Layout(
        {"query_key_value": falcon},
        "num_heads",
        kv_heads=lambda m: m.num_heads if not (m.new_decoder_architecture or m.multi_query) else m.num_kv_heads,
        width="head_dim",
        groups="num_kv_heads",
    ),
    "florence2.Florence2VisionChannelAttention": Layout({"qkv": "q k v"}, "groups"),  # logits between channels
    "gpt2.GPT2Attention": GPT2,
    "gpt_bigcode.GPTBigCodeAttention": Layout(
        {
            "c_attn": lambda m: "q k v" if m.multi_query else "(k v)" if m.is_cross_attention else "(q k v)",
            "q_attn": "q",
        },
        "num_heads",
        kv_heads=lambda m: 1 if m.multi_query else m.num_heads,
        width="head_dim",
    ),
    "gpt_neox.GPTNeoXAttention": PER_HEAD,
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": PER_HEAD,
    "granite_speech.GraniteSpeechConformerAttention": TO_KV,
    "granite_speech_plus.GraniteSpeechPlusConformerAttention": TO_KV,
    "imagegpt.ImageGPTAttention": GPT2,
    "layoutlmv2.LayoutLMv2SelfAttention": FIXED({"query": "q", "key": "k", "qkv_linear": "q k v"}),
    "levit.LevitAttention": Layout({"queries_keys_values.linear": "(q k v)"}, heads, width="key_dim"),
    "levit.LevitAttentionSubsample": Layout(
        {"queries.linear": "q", "keys_values.linear": "(k v)"}, heads, width="key_dim"
    ),
    "minimax.MiniMaxLightningAttention": EQUAL({"qkv_proj": "(q k v)"}),
    "mobilevitv2.MobileViTV2LinearSelfAttention": Layout(  # one row of scores, no q·k
        {"qkv_proj.convolution": "q k v"}, 1, width=1, k_width="embed_dim"
    ),
    "modernbert.ModernBertAttention": EQUAL({"Wqkv": "q k v"}),
    "mpt.MptAttention": EQUAL({"Wqkv": "q k v"}),
    "openai.Attention": Layout({"c_attn": "q k v"}, "n_head", transposed=True),
    "persimmon.PersimmonAttention": PER_HEAD,
    "phi3.Phi3Attention": FIXED({"qkv_proj": "q k v"}),
    "phi4_multimodal.Phi4MultimodalAttention": FIXED({"qkv_proj": "q k v"}),
    "qwen3_5.Qwen3_5Attention": GATED,
    "qwen3_5_moe.Qwen3_5MoeAttention": GATED,
    "qwen3_next.Qwen3NextAttention": GATED,
    "reformer.LSHSelfAttention": FIXED({"query_key": "q"}),  # one projection is both
    "bros.BrosRelationExtractor": Layout({"query": "q", "key": "k"}, "n_relations"),
    # more than one pair of projections, or one without the other
    "conditional_detr.ConditionalDetrDecoderSelfAttention": CONTENT_AND_POSITION,
    "conditional_detr.ConditionalDetrDecoderCrossAttention": CONTENT_AND_POSITION,
    "dab_detr.DabDetrDecoderLayerSelfAttention": dab_detr("self_attn", "self_attn.attention_heads"),
    "dab_detr.DabDetrDecoderLayerCrossAttention": dab_detr("cross_attn", "decoder_attention_heads"),
    "deberta_v2.DisentangledSelfAttention": DISENTANGLED,
    "deepseek_v4.DeepseekV4Attention": Layout({"q_b_proj": "q"}, "num_heads", width="head_dim"),  # its key is its value
    "evolla.EvollaSequenceAlignerCrossAttention": FIXED(
        {"query": "q", "key_protein": "k", "key_structure": "k", "key_msa": "k"}
    ),
    "gemma4.Gemma4AudioAttention": FIXED({"q_proj.linear": "q", "k_proj.linear": "k", "relative_k_proj": "k"}),
    "grounding_dino.GroundingDinoBiMultiHeadAttention": FIXED({"vision_proj": "q", "text_proj": "k"}),
    "led.LEDEncoderSelfAttention": GLOBAL,
    "lilt.LiltSelfAttention": Layout({"query": "q", "key": "k", "layout_query": "q", "layout_key": "k"}, heads),
    "longformer.LongformerSelfAttention": GLOBAL,
    "luke.LukeSelfAttention": FIXED({"query": "q", "w2e_query": "q", "e2w_query": "q", "e2e_query": "q", "key": "k"}),
    "mm_grounding_dino.MMGroundingDinoBiMultiHeadAttention": FIXED({"vision_proj": "q", "text_proj": "k"}),
    "nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention": RELATIVE,
    "parakeet.ParakeetEncoderAttention": RELATIVE,
    "sew_d.DisentangledSelfAttention": DISENTANGLED,
    # one head, which nothing states
    "apertus1p5.Apertus1p5VisionTokenizerAttnBlock": ONE_HEAD,
    "chameleon.ChameleonVQVAEEncoderAttnBlock": ONE_HEAD,
    "groupvit.GroupViTAssignAttention": Layout({"q_proj": "q", "k_proj": "k"}, 1),
    "janus.JanusVQVAEAttnBlock": ONE_HEAD,
    "swiftformer.SwiftFormerEfficientAdditiveAttention": Layout({"to_query": "q", "to_key": "k"}, 1),
    "wavtokenizer.WavTokenizerVocosAttention": ONE_HEAD,
    # projections that are no weights with rows of heads
    "jetmoe.JetMoeAttention": Layout(skip="its queries are a mixture of experts, one stacked weight for all"),
    "xlnet.XLNetRelativeAttention": Layout(
        skip="its weights are (d, heads, r) parameters without a projection of their own"
    ),
}
LATENT_CLASSES = (
    "axk1.AXK1Attention",
    "axk2.AXK2Attention",
    "bailing_hybrid.BailingHybridAttention",
    "deepseek_v2.DeepseekV2Attention",
    "deepseek_v3.DeepseekV3Attention",
    "deepseek_v32.DeepseekV32Attention",
    "dots3_note.Dots3NoteTextAttention",
    "glm4_moe_lite.Glm4MoeLiteAttention",
    "glm5_next.Glm5NextTextAttention",
    "glm_moe_dsa.GlmMoeDsaAttention",
    "hy_v4.HYV4Attention",
    "hy_v4_vl.HYV4VLAttention",
    "kimi_linear.KimiLinearAttention",
    "longcat_flash.LongcatFlashMLA",
    "minicpm3.MiniCPM3Attention",
    "mistral4.Mistral4Attention",
    "mistral_large4.MistralLarge4TextAttention",
    "youtu.YoutuAttention",
)
# One weight "qkv", whose output every one of these classes views as (…, 3, heads, width).
QKV_CLASSES = (
    "blip.BlipAttention",
    "blip_2.Blip2Attention",
    "cohere_compass.CohereCompassVisionAttention",
    "deepseek_ocr2.DeepseekOcr2SamVisionAttention",
    "dots3_note.Dots3NoteVisionAttention",
    "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention",
    "exaone4_5.Exaone4_5_VisionAttention",
    "florence2.Florence2VisionWindowAttention",
    "glm4v.Glm4vVisionAttention",
    "glm4v_moe.Glm4vMoeVisionAttention",
    "glm5_next.Glm5NextVisionAttention",
    "glm_image.GlmImageVisionAttention",
    "glm_ocr.GlmOcrVisionAttention",
    "got_ocr2.GotOcr2VisionAttention",
    "hiera.HieraMaskUnitAttention",
    "instructblip.InstructBlipAttention",
    "instructblipvideo.InstructBlipVideoAttention",
    "mgp_str.MgpstrAttention",
    "pp_formulanet.PPFormulaNetVisionAttention",
    "pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention",
    "pp_ocrv5_server_rec.PPOCRV5ServerRecAttention",
    "pp_ocrv6_small_rec.PPOCRV6SmallRecAttention",
    "qwen2_5_vl.Qwen2_5_VLVisionAttention",
    "qwen2_vl.VisionAttention",
    "qwen3_5.Qwen3_5VisionAttention",
    "qwen3_5_moe.Qwen3_5MoeVisionAttention",
    "qwen3_omni_moe.Qwen3OmniMoeVisionAttention",
    "qwen3_vl.Qwen3VLVisionAttention",
    "qwen3_vl_moe.Qwen3VLMoeVisionAttention",
    "qwen4_exp.Qwen4ExpVisionAttention",
    "sam.SamVisionAttention",
    "sam2.Sam2MultiScaleAttention",
    "sam_hq.SamHQVisionAttention",
    "seggpt.SegGptAttention",
    "slanext.SLANeXtVisionAttention",
    "timesformer.TimesformerSelfAttention",
    "unlimited_ocr.UnlimitedOcrSamVisionAttention",
    "vitdet.VitDetAttention",
)
# Attention by name alone: sampling, pooling, gates and wrappers without queries and keys.
NO_QUERIES = (
    "d_fine.DFineMultiscaleDeformableAttention",
    "deformable_detr.DeformableDetrMultiscaleDeformableAttention",
    "deimv2.Deimv2MultiscaleDeformableAttention",
    "edgetam_video.EdgeTamVideoMemoryAttentionMLP",
    "esmfold2.EsmFold2RowAttentionPooling",
    "grounding_dino.GroundingDinoMultiscaleDeformableAttention",
    "inkling2.Inkling2BlockAttentionResidual",
    "inkling2_loop.Inkling2LoopBlockAttentionResidual",
    "inkling2_loop.Inkling2LoopMessageAttentionResidual",
    "lw_detr.LwDetrMultiscaleDeformableAttention",
    "lxmert.LxmertAttentionOutput",
    "mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
    "mm_grounding_dino.MMGroundingDinoMultiscaleDeformableAttention",
    "omdet_turbo.OmDetTurboMultiscaleDeformableAttention",
    "oneformer.OneFormerPixelDecoderEncoderMultiscaleDeformableAttention",
    "patchtsmixer.PatchTSMixerGatedAttention",
    "phi4_multimodal.Phi4MultimodalAudioRelativeAttentionBias",
    "pp_doclayout_v2.PPDocLayoutV2MultiscaleDeformableAttention",
    "pp_doclayout_v3.PPDocLayoutV3MultiscaleDeformableAttention",
    "pp_doclayout_v4.PPDocLayoutV4MultiscaleDeformableAttention",
    "rf_detr.RfDetrMultiscaleDeformableAttention",
    "rt_detr.RTDetrMultiscaleDeformableAttention",
    "rt_detr_v2.RTDetrV2MultiscaleDeformableAttention",
    "rwkv.RwkvSelfAttention",
    "slanet.SLANetAttentionGRUCell",
    "slanext.SLANeXtAttentionGRUCell",
)
TABLE = (
    ROWS
    | dict.fromkeys(QKV_CLASSES, QKV)
    | dict.fromkeys(LATENT_CLASSES, LATENT)
    | dict.fromkeys(NO_QUERIES, Layout(skip="it has no query or key projection"))
)


def qualified(name: str) -> str:
    """Long name of a short one: "gpt2.GPT2Attention" → "transformers.models.gpt2.modeling_gpt2.GPT2Attention"."""
    folder, cls = name.split(".")
    file = "esmfold" if cls.startswith("EsmFold") and folder == "esm" else folder
    return f"transformers.models.{folder}.modeling_{file}.{cls}"


for _name, _layout in TABLE.items():
    register(qualified(_name), _layout)
