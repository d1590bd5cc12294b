"""The example scripts as modules: they run as files from their own folder, which is not on pytest's path."""

import importlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SHARED = Path(os.environ.get("STIEFEL_GEO_SHARED", ROOT.parent / "shared"))

if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))

atomic_files = importlib.import_module("finetuning.atomic_files")
batches = importlib.import_module("finetuning.batches")
finetune = importlib.import_module("finetune")
image_data = importlib.import_module("finetuning.image_data")
image_files = importlib.import_module("finetuning.image_files")
loaders = importlib.import_module("loaders")
optimize_frame = importlib.import_module("optimize_frame")
pretrain = importlib.import_module("small_vit.pretrain")
process_group = importlib.import_module("finetuning.process_group")
run_record = importlib.import_module("finetuning.run_record")
small_vit = importlib.import_module("small_vit")
starting_model = importlib.import_module("finetuning.starting_model")
training = importlib.import_module("finetuning.training")
validate_gpu = importlib.import_module("validate_gpu")
VALIDATION = ("agreement", "cuda_tests", "rows", "several_gpus", "stages", "step_compiled", "step_costs")
validation = {name: importlib.import_module(f"validation.{name}") for name in VALIDATION}

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"{SHARED} is absent; set STIEFEL_GEO_SHARED to the folder of data and weights"
)
