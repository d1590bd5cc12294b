"""Tiny runs of examples/finetune.py, and what they leave."""

import hashlib
import json

from .example_scripts import finetune

TINY = ["--limit-train", "64", "--limit-test", "32", "--batch-size", "16"]


def run(out, *more, expect=0):
    assert finetune.main([*TINY, "--out", str(out), *map(str, more)]) == expect


def figures(out):
    """The rows of metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]


def digest(folder):
    """Name and content of every file below."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def one_line(text):
    """The command's own line on stderr, which stands alone."""
    (line,) = [line for line in text.splitlines() if line.startswith("finetune: ")]
    assert "Traceback" not in text
    return line
