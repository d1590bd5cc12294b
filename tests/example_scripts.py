"""The example scripts as modules: they run as files from their own folder, which is not on pytest's path."""

import importlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SHARED = Path(os.environ.get("STIEFEL_GEO_SHARED", ROOT.parent / "shared"))

if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))

atomic_files = importlib.import_module("atomic_files")
finetune = importlib.import_module("finetune")
image_data = importlib.import_module("image_data")
optimize_frame = importlib.import_module("optimize_frame")
pretrain = importlib.import_module("pretrain")
run_record = importlib.import_module("run_record")
small_vit = importlib.import_module("small_vit")
starting_model = importlib.import_module("starting_model")
training = importlib.import_module("training")

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"{SHARED} is absent; set STIEFEL_GEO_SHARED to the folder of data and weights"
)
