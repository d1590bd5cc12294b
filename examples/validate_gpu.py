"""Validate the package on this machine's GPU in at most ten minutes, offline: REPORT.md and report.json.

    python examples/validate_gpu.py --out DIR                        # needs: pip install -e ".[benchmark,test]"
    python examples/validate_gpu.py --out DIR --device cpu --smoke   # all stages on tiny models, to see that they run

Every stage is a process of its own with a time limit: one that dies or hangs is a failed row, and the others go on.
The report is rewritten after every stage. Exit code 1 when a bound is broken or a stage fails. What a machine cannot
run (two GPUs where there is one) stands in the report as left out, with the reason.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from validation.report import write_report
from validation.rows import Settings
from validation.stages import SECONDS, STAGES, run_here, run_stage


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--out", type=Path, default=Path("runs/validation"))
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--smoke", action="store_true", help="tiny frames and models, a few steps")
    add("--only", nargs="+", choices=STAGES, default=list(STAGES), help="these stages alone")
    add("--stage", choices=STAGES, help=argparse.SUPPRESS)  # what the process of one stage is started with
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    settings = Settings(args.device, args.smoke, args.out.resolve())
    if args.stage:
        return run_here(args.stage, settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + SECONDS, {}
    for name in args.only:
        print(f"{name} …", flush=True)
        results[name] = run_stage(name, settings, end - time.monotonic())
        write_report(results, settings)
        for row in results[name].rows:
            print(f"  {row}", flush=True)
    failed = [row for result in results.values() for row in result.rows if row.holds is False]
    print(f"{len(failed)} failed; {settings.out / 'REPORT.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
