"""Tiny random models of transformers, one per family, with inputs: what the tests of losslessness run."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
PIXELS = {"image_size": 32, "patch_size": 8}
WORDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
TEXT = SIZES | WORDS
GROUPED = TEXT | {"num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64} | {
    k: WORDS[k] for k in ("vocab_size", "eos_token_id")
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
LAYERS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_model": 32,
}
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "share_att_key": True}
SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}
SPEECH = {"conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 4], "num_feat_extract_layers": 2}
WHISPER = LAYERS | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SAM2_BACKBONE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "blocks_per_stage": [1, 2],
    "embed_dim_per_stage": [16, 32],
    "num_attention_heads_per_stage": [2, 4],
    "window_size_per_stage": [4, 2],
    "global_attention_blocks": [2],
    "image_size": [32, 32],
    "query_stride": [2, 2],
    "num_query_pool_stages": 1,
    "window_positional_embedding_background_size": [4, 4],
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "out_features": ["stage2"],
}


def words() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(3, 27).view(2, 12)}


def pair() -> dict[str, Tensor]:
    return words() | {"decoder_input_ids": torch.arange(5, 15).view(2, 5)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32, dtype=torch.float64).sin().view(2, 3, 32, 32)}


def patches_of_pixels() -> dict[str, Tensor]:
    """Two images of other shapes, the second with one patch of padding."""
    patches = torch.linspace(-1, 1, 2 * 16 * 48, dtype=torch.float64).sin().view(2, 16, 48)
    shapes, mask = torch.tensor([[4, 4], [3, 5]]), torch.ones(2, 16, dtype=torch.int64)
    mask[1, 15] = 0
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def speech() -> dict[str, Tensor]:
    return {"input_values": torch.linspace(0, 40, 2 * 400, dtype=torch.float64).sin().view(2, 400)}


def mel() -> dict[str, Tensor]:
    features = torch.linspace(0, 20, 2 * 8 * 32, dtype=torch.float64).sin().view(2, 8, 32)
    return {"input_features": features, "decoder_input_ids": pair()["decoder_input_ids"]}


def masked_pixels() -> dict[str, Tensor]:
    return pixels() | {"noise": torch.linspace(0, 1, 32).view(2, 16)}


def text_and_pixels() -> dict[str, Tensor]:
    return words() | pixels()


def image_in_text() -> dict[str, Tensor]:
    ids = torch.arange(3, 43).view(2, 20)
    ids[:, 1:17] = 63
    return pixels() | {"input_ids": ids}


Family = tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]
# family → config class, model class, config, inputs
FAMILIES: dict[str, Family] = {
    "vit": ("ViTConfig", "ViTModel", SIZES | PIXELS, pixels),
    "dinov2": ("Dinov2Config", "Dinov2Model", SIZES | PIXELS, pixels),
    "dinov3": ("DINOv3ViTConfig", "DINOv3ViTModel", SIZES | PIXELS, pixels),
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {"text_config": TEXT, "vision_config": SIZES | PIXELS, "projection_dim": 16},
        text_and_pixels,
    ),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", SIZES | PIXELS, pixels),
    "siglip2": (
        "Siglip2VisionConfig",
        "Siglip2VisionModel",
        SIZES | {"num_patches": 16, "patch_size": 4},
        patches_of_pixels,
    ),
    "beit": ("BeitConfig", "BeitModel", SIZES | PIXELS | {"use_relative_position_bias": True}, pixels),
    "swinv2": ("Swinv2Config", "Swinv2Model", SWIN, pixels),
    "sam2": ("Sam2HieraDetConfig", "Sam2HieraDetModel", SAM2_BACKBONE, pixels),
    "vit_mae": (
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        SIZES
        | PIXELS
        | {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
        | {"decoder_intermediate_size": 16},
        masked_pixels,
    ),
    "detr": (
        "DetrConfig",
        "DetrModel",
        LAYERS | {"num_queries": 4, "backbone_config": RESNET, "use_timm_backbone": False},
        pixels,
    ),
    "whisper": ("WhisperConfig", "WhisperModel", WHISPER | TOKENS, mel),
    "wav2vec2": (
        "Wav2Vec2Config",
        "Wav2Vec2Model",
        SIZES | SPEECH | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        speech,
    ),
    "bert": ("BertConfig", "BertModel", TEXT, words),
    "roberta": ("RobertaConfig", "RobertaModel", TEXT, words),
    "modernbert": ("ModernBertConfig", "ModernBertModel", TEXT | {"cls_token_id": 1, "sep_token_id": 2}, words),
    "deberta": ("DebertaConfig", "DebertaModel", TEXT | DEBERTA, words),
    "deberta_v2": ("DebertaV2Config", "DebertaV2Model", TEXT | DEBERTA, words),
    "t5": ("T5Config", "T5Model", T5, pair),
    "bart": ("BartConfig", "BartModel", LAYERS | TOKENS | {"max_position_embeddings": 64}, pair),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, words),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT, words),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", GPT2 | {"n_head": 8, "n_ctx": 64, "rotary_dim": 4}, words),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, words),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": 8}, words),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        GROUPED
        | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"shared_expert_intermediate_size": 24}
        | EXPERTS,
        words,
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GROUPED | {"head_dim": 8}, words),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED, words),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GROUPED, words),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", GROUPED | {"num_local_experts": 4}, words),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        TEXT | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1} | LATENT | EXPERTS,
        words,
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        WORDS
        | {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 48}
        | {"word_embed_proj_dim": 32},
        words,
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64},
        words,
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        TEXT | {"new_decoder_architecture": True, "num_kv_heads": 2},
        words,
    ),
    "falcon_7b": ("FalconConfig", "FalconForCausalLM", TEXT | {"multi_query": True}, words),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64}, words),
    "llava": (
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": GROUPED | {"model_type": "llama"},
            "vision_config": SIZES | PIXELS | {"model_type": "clip_vision_model"},
            "image_token_id": 63,
            "image_token_index": 63,
            "vision_feature_layer": -1,
        },
        image_in_text,
    ),
}


def tiny(family: str, **config: Any) -> Any:
    """A float64 model of the family with random weights, each projection with a spectrum of its own, in eval mode."""
    config_class, model_class, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    settings = getattr(transformers, config_class)(**sizes | config)
    settings._experts_implementation = "eager"  # torch's grouped products know no float64
    model = getattr(transformers, model_class)(settings).double().eval()
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return model


def outputs(model: nn.Module, family: str) -> Tensor:
    """The first floating tensors of the model's outputs, as one vector."""
    with torch.no_grad():
        found = model(**FAMILIES[family][3]())
    tensors = [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.cat([value.flatten() for value in tensors])
