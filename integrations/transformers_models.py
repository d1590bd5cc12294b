"""Every model class of the installed transformers, built from its default config: what the coverage command walks.

On the meta device nothing is allocated, so the configs are those of the library, at full size.
"""

import fnmatch
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

# What a default config lacks to build its models, by folder.
SETTINGS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 24},
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    },
    "beit": {"out_indices": [3, 5, 7, 11]},
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8}},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "informer": {"prediction_length": 24},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "time_series_transformer": {"prediction_length": 24},
}


def names(pattern: str) -> list[str]:
    """Short name, "folder.Class", of every model class in the folders of transformers.models that match."""
    root = Path(transformers.models.__path__[0])
    files = sorted(path for path in root.glob("*/modeling_*.py") if fnmatch.fnmatch(path.parent.name, pattern))
    return [f"{path.parent.name}.{cls.__name__}" for path in files for cls in _classes(path)]


def build(name: str) -> nn.Module:
    """The model class at its default config. Raises whatever transformers raises."""
    folder, _, cls = name.partition(".")
    path = next(Path(transformers.models.__path__[0], folder).glob("modeling_*.py")).parent
    found = next(model for file in path.glob("modeling_*.py") for model in _classes(file) if model.__name__ == cls)
    with torch.device("meta"):
        return found(found.config_class(**SETTINGS.get(folder, {})))  # type: ignore[misc]


def _classes(path: Path) -> Iterator[type[PreTrainedModel]]:
    """Model classes that a modeling file defines; none where it cannot be imported."""
    try:
        module = getattr(getattr(transformers.models, path.parent.name), path.stem)
    except (ImportError, AttributeError):
        return
    for name, cls in vars(module).items():
        own = inspect.isclass(cls) and cls.__module__ == module.__name__ and issubclass(cls, PreTrainedModel)
        if own and cls.config_class is not None and not name.endswith("PreTrainedModel"):
            yield cls
