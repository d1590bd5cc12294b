"""The scripts of the evidence as modules."""

import importlib

from example_scripts import EXAMPLES

cifar10_patches = importlib.import_module("cifar10_patches")
claims = importlib.import_module("claims")
evidence = importlib.import_module("evidence")
finetune_pairs = importlib.import_module("finetune_pairs")
frame_steps = importlib.import_module("frame_steps")
grokking = importlib.import_module("grokking")
harness = importlib.import_module("harness")
modular_transformer = importlib.import_module("modular_transformer")
paired_statistics = importlib.import_module("paired_statistics")
patch_stages = importlib.import_module("patch_stages")
patch_training = importlib.import_module("patch_training")
patch_transformer = importlib.import_module("patch_transformer")
report = importlib.import_module("report")
report_sections = importlib.import_module("report_sections")

__all__ = [
    "EXAMPLES",
    "cifar10_patches",
    "claims",
    "evidence",
    "finetune_pairs",
    "frame_steps",
    "grokking",
    "harness",
    "modular_transformer",
    "paired_statistics",
    "patch_stages",
    "patch_training",
    "patch_transformer",
    "report",
    "report_sections",
]
