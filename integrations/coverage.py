"""`python -m stiefel_geo.integrations.coverage`: which of timm's architectures `patch` covers.

Every architecture is built on the meta device and patched there, so nothing is downloaded and nothing computed.
"""

import argparse
import fnmatch
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import timm
import torch

import stiefel_geo
from stiefel_geo.layouts import find
from stiefel_geo.report import PatchReport, Skipped

STATUSES = ("wholly", "in part", "not at all", "without attention")


@dataclass
class Coverage:
    """One architecture: modules patched by class, and modules skipped by class and reason."""

    name: str
    family: str
    status: str
    patched: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    error: str = ""


def cover(name: str) -> Coverage:
    """Build `name` on the meta device and patch it."""
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False)
    family = type(model).__module__.rpartition(".")[2]
    holds_known = any((found := find(module)) and not found[1].skip for module in model.modules())
    try:
        report = stiefel_geo.patch(model)
    except ValueError as error:
        status = "not at all" if holds_known else "without attention"
        return Coverage(name, family, status, error=str(error) if holds_known else "")
    return Coverage(name, family, _status(report), _patched(report), _skipped(report.skipped))


def _status(report: PatchReport) -> str:
    """In part: a module that projects queries or keys, or may do so, was left out."""
    return "wholly" if all(_known_to_be_skipped(entry) for entry in report.skipped) else "in part"


def _known_to_be_skipped(entry: Skipped) -> bool:
    return "no query or key projection" in entry.reason or "does not depend on W_Q" in entry.reason


def _patched(report: PatchReport) -> dict[str, int]:
    return dict(Counter(entry.cls for entry in report.patched))


def _skipped(entries: Iterable[Skipped]) -> dict[str, int]:
    return dict(Counter(entry.summary() for entry in entries))


def table(coverages: Sequence[Coverage]) -> str:
    """Architectures by family and status, and every reason for what was left out."""
    families = sorted({c.family for c in coverages if c.status != STATUSES[-1]})
    lines = [f"{'family':<28}" + "".join(f"{status:>12}" for status in STATUSES[:3])]
    for family in families:
        counts = Counter(c.status for c in coverages if c.family == family)
        lines.append(f"{family:<28}" + "".join(f"{counts[status]:>12}" for status in STATUSES[:3]))
    counts = Counter(c.status for c in coverages)
    lines.append(f"{'all':<28}" + "".join(f"{counts[status]:>12}" for status in STATUSES[:3]))
    lines.append(f"{counts[STATUSES[-1]]} architectures have no attention with queries and keys")
    reasons = Counter(reason for c in coverages for reason in c.skipped)
    lines += [f"left out in {count} architectures: {reason}" for reason, count in reasons.most_common()]
    lines += [f"{c.name}: {c.error}" for c in coverages if c.error]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if an architecture is not covered wholly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="*", help="glob over architecture names, e.g. 'swin*'")
    parser.add_argument("--json", type=Path, help="write every architecture's figures to this file")
    options = parser.parse_args(argv)
    names = fnmatch.filter(timm.list_models(), options.family)
    if not names:
        print(f"no architecture of timm {timm.__version__} matches {options.family!r}", file=sys.stderr)
        return 2
    coverages = []
    for done, name in enumerate(names, 1):
        coverages.append(cover(name))
        gc.collect()  # meta models hold cycles
        if sys.stderr.isatty():
            print(f"\r{done}/{len(names)} {name:<60}", end="", file=sys.stderr)
    print(table(coverages))
    if options.json:
        options.json.write_text(json.dumps([asdict(coverage) for coverage in coverages], indent=1))
    return int(any(coverage.status in ("in part", "not at all") for coverage in coverages))


if __name__ == "__main__":
    sys.exit(main())
