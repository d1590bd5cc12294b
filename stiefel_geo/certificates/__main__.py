"""Print the table of certificates as Markdown; exit with 1 when one fails.

python -m stiefel_geo.certificates [--json FILE] [--seed N] [--shapes 16x4 64x16]
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import SHAPES, certify, markdown
from .certificate import Case


def shape(text: str) -> tuple[int, int]:
    """(d, r) from "768x64"."""
    d, _, r = text.partition("x")
    try:
        case = Case(int(d), int(r), seed=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return case.d, case.r


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m stiefel_geo.certificates", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every certificate there, unmerged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, metavar="DxR")
    args = parser.parse_args(argv)
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json needs a folder that exists, got {args.json}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """0: every certificate holds. 1: one does not."""
    args = options(argv)
    started = time.perf_counter()
    certificates = certify(args.shapes, args.seed)
    print(markdown(certificates))
    failed = [c for c in certificates if not c.holds]
    for c in failed:
        print(f"FAILED: proposition {c.proposition} at {c.d}×{c.r}: {c.claim}: {c.measured} not {c.relation} {c.bound}")
    seconds = time.perf_counter() - started
    held = len(certificates) - len(failed)
    print(f"\n{held} of {len(certificates)} certificates hold: float64, seed {args.seed}, {seconds:.0f} s.")
    if args.json is not None:
        args.json.write_text(json.dumps([c.as_dict() for c in certificates], indent=1, ensure_ascii=False))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
