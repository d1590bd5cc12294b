"""The paper's experiments, one command each.

python examples/experiment.py patches --data ../shared/data/cifar10-jpeg
python examples/experiment.py grokking
python examples/experiment.py finetune_pairs --data ../shared/data/cifar10-jpeg ...
python examples/experiment.py scratch --data ../shared/data/cifar10-jpeg
python examples/experiment.py report                       # everything that the runs say
"""

import importlib
import sys
from collections.abc import Sequence

NAMES = ("patches", "grokking", "finetune_pairs", "scratch", "report")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named experiment with the arguments after its name."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in NAMES:
        print(f"{__doc__}\nexperiments: {', '.join(NAMES)}")
        return 0 if name in ("-h", "--help") else 2
    return int(importlib.import_module(f"experiments.{name}").main(rest))


if __name__ == "__main__":
    sys.exit(main())
