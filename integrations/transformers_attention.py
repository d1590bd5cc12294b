"""Rows of Hugging Face transformers' vision models: separate query and key Linear layers, logits plain q·k.

By class name, so nothing is imported here; `patch` reads this table by itself. Tested with transformers 5.24.
"""

from stiefel_geo.layouts import Layout, register

Q_PROJ_K_PROJ = {"q_proj": "q", "k_proj": "k"}

TABLE = {
    "vit.modeling_vit.ViTAttention": Layout(Q_PROJ_K_PROJ, "num_attention_heads", plain=True),
    "dinov2.modeling_dinov2.Dinov2Attention": Layout(Q_PROJ_K_PROJ, "num_attention_heads", plain=True),
    "clip.modeling_clip.CLIPAttention": Layout(Q_PROJ_K_PROJ, plain=True),
}

for _name, _layout in TABLE.items():
    register(f"transformers.models.{_name}", _layout)
