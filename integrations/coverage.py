"""`python -m stiefel_geo.integrations.coverage`: which models of timm, or of transformers, `patch` covers.

Every model is built on the meta device and patched there, so nothing is downloaded and nothing computed.
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
from typing import Any, Protocol

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import stiefel_geo
from stiefel_geo.attention.layouts import find
from stiefel_geo.attention.report import PatchReport, Skipped

STATUSES = ("wholly", "in part", "not at all", "not built", "without attention")


@dataclass
class Coverage:
    """One model: modules patched by class, and modules skipped by class and reason."""

    name: str
    family: str
    status: str
    patched: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    error: str = ""


class Library(Protocol):
    """A library's models by name."""

    def names(self, pattern: str) -> list[str]: ...

    def build(self, name: str) -> nn.Module: ...


class _Readable(TorchFunctionMode):
    """`torch.linspace` has values: older timm reads the drop rates of its blocks from it while it builds them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cpu = {"device": "cpu"} if func is torch.linspace else {}
        return func(*args, **{**cpu, **(kwargs or {})})


class Timm:
    """timm's architectures, by name."""

    def names(self, pattern: str) -> list[str]:
        return fnmatch.filter(timm.list_models(), pattern)

    def build(self, name: str) -> nn.Module:
        with torch.device("meta"), _Readable():
            return timm.create_model(name, pretrained=False)


def _library(name: str) -> Library:
    if name == "timm":
        return Timm()
    from . import transformers_models  # optional

    return transformers_models


def cover(name: str, library: Library = Timm()) -> Coverage:  # noqa: B008  # it has no state
    """Build `name` on the meta device and patch it."""
    try:
        model = library.build(name)
    except Exception as error:
        return Coverage(name, name.partition(".")[0], "not built", error=f"{type(error).__name__}: {error}")
    family = name.rpartition(".")[0] or type(model).__module__.rpartition(".")[2]
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
    """Models by family and status, and every reason for what was left out."""
    shown = STATUSES[:4] if any(c.status == "not built" for c in coverages) else STATUSES[:3]
    families = sorted({c.family for c in coverages if c.status != STATUSES[-1]})
    rows = [(family, [c for c in coverages if c.family == family]) for family in families]
    lines = [f"{'family':<28}" + "".join(f"{status:>12}" for status in shown)]
    for family, members in [*rows, ("all", coverages)]:
        counts = Counter(c.status for c in members)
        lines.append(f"{family:<28}" + "".join(f"{counts[status]:>12}" for status in shown))
    whole = sum(all(c.status in ("wholly", "without attention") for c in members) for _, members in rows)
    lines.append(f"{whole} of {len(rows)} families wholly")
    lines.append(f"{counts[STATUSES[-1]]} models have no attention with queries and keys")
    reasons = Counter(reason for c in coverages for reason in c.skipped)
    lines += [f"left out in {count} models: {reason}" for reason, count in reasons.most_common()]
    lines += [f"{c.name}: {_first(c.error)}" for c in coverages if c.error]
    return "\n".join(lines)


def _first(error: str) -> str:
    """The start of a message that may list every module of a model."""
    return error if len(error) < 240 else f"{error[:240].rstrip()} …"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a model is not covered wholly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=("timm", "transformers"), default="timm")
    parser.add_argument("--family", default="*", help="glob over architectures ('swin*') or model folders ('qwen*')")
    parser.add_argument("--json", type=Path, help="write every model's figures to this file")
    options = parser.parse_args(argv)
    library = _library(options.library)
    names = library.names(options.family)
    if not names:
        print(f"no model of {options.library} matches {options.family!r}", file=sys.stderr)
        return 2
    coverages = []
    for done, name in enumerate(names, 1):
        coverages.append(cover(name, library))
        gc.collect()  # meta models hold cycles
        if sys.stderr.isatty():
            print(f"\r{done}/{len(names)} {name:<60}", end="", file=sys.stderr)
    print(table(coverages))
    if options.json:
        options.json.write_text(json.dumps([asdict(coverage) for coverage in coverages], indent=1))
    return int(any(coverage.status in STATUSES[1:4] for coverage in coverages))


if __name__ == "__main__":
    sys.exit(main())
