"""The scripts of the evidence as modules."""

import importlib

from .example_scripts import EXAMPLES

claims = importlib.import_module("experiments.claims")
evidence = importlib.import_module("experiments.evidence")
finetune_pairs = importlib.import_module("experiments.finetune_pairs")
frame_steps = importlib.import_module("experiments.frame_steps")
grokking = importlib.import_module("experiments.grokking")
harness = importlib.import_module("experiments.harness")
modular_transformer = importlib.import_module("experiments.modular_transformer")
paired_statistics = importlib.import_module("experiments.paired_statistics")
patch_evidence = importlib.import_module("experiments.patch_evidence")
patch_stages = importlib.import_module("experiments.patch_stages")
patch_training = importlib.import_module("experiments.patch_training")
patch_transformer = importlib.import_module("experiments.patch_transformer")
patches = importlib.import_module("experiments.patches")
report = importlib.import_module("experiments.report")
report_sections = importlib.import_module("experiments.report_sections")
scratch = importlib.import_module("experiments.scratch")
scratch_report = importlib.import_module("experiments.scratch_report")

__all__ = [
    "EXAMPLES",
    "claims",
    "evidence",
    "finetune_pairs",
    "frame_steps",
    "grokking",
    "harness",
    "modular_transformer",
    "paired_statistics",
    "patch_evidence",
    "patch_stages",
    "patch_training",
    "patch_transformer",
    "patches",
    "report",
    "report_sections",
    "scratch",
    "scratch_report",
]
