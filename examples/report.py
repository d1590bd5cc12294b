"""From the finished runs in examples/results/*.jsonl to REPORT.md, its pictures, and README's summary table.

    python examples/report.py            # examples/results/REPORT.md and the pictures
    python examples/report.py --readme   # also the table between <!-- evidence --> and <!-- /evidence -->

Nothing is typed in by hand: figures and verdicts follow from the runs by the rules of paired_statistics.py.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from atomic_files import write_atomically
from bad_input import BadInput
from claims import finetune_claims, grokking_claims, patch_claims
from evidence import BASELINE, OURS, by_arm, by_peak, described, differences, main_configuration, pairs_only, sweep
from evidence_plots import draw_grokking, draw_movement, draw_pair_lines, draw_pairs, draw_phase
from frame_steps import ARMS
from harness import RESULTS, Record, key, read_records
from paired_statistics import RULES
from patch_stages import OTHER_PAIRS, STAGES, chosen_lr
from report_sections import (
    arms_section,
    finetune_section,
    grid_section,
    grokking_section,
    ladder_section,
    movement_section,
    other_section,
    summary,
    sweep_section,
)  # fmt: skip

START, END = "<!-- evidence -->", "<!-- /evidence -->"
NOTES = """\
Images are CIFAR-10 as JPEG copies, reduced in size by averaging; half of them are mirrored. Test accuracy is on 5,000
test images, learning rates are chosen on 2,000 other training images, by runs with seeds of their own. Within a pair
start, images, order and mirroring are the same. Everything that is not a frame is trained by AdamW in every arm; every
head has a learned logit gain, exp(gain)·q·k/√r, so that orthonormal frames are not held at small logits. The sweeps
keep the learning rates chosen in the main configuration. `geoopt_adam` is geoopt's RiemannianAdam: on Stiefel its
second moment is one number a frame, as ours, but a sum where ours is a mean, so at equal lr it steps √(d·r) times
shorter. `fixed_step` is Riemannian SGD with momentum, at the same learning rates; `fixed_step_long` multiplies its
steps by 600. That arm and the variants of `scale_free` take the learning rate of the arm they vary."""


def records_of(folder: Path) -> tuple[list[Record], list[Record], list[Record]]:
    """Finished runs on images, on modular addition (unfinished ones as far as they got), and of fine-tuning."""
    patches = read_records(folder / "patches.jsonl")
    grokking = read_records(folder / "grokking.jsonl")
    done = {str(record["config"]) for record in grokking}
    unfinished = [r for r in read_records(folder / "grokking.partial.jsonl") if str(r["config"]) not in done]
    return patches, grokking + unfinished, read_records(folder / "finetune.jsonl")


def missing(patches: Sequence[Record], grokking: Sequence[Record], tuned: Sequence[Record]) -> str:
    """What the stages hold and the runs do not, counted."""
    kinds = {"images": patches, "modular addition": grokking, "fine-tuning": tuned}
    lines = [f"{name}: no runs" for name, runs in kinds.items() if not runs]
    if pairs_only(patches):
        main = main_configuration(patches)
        lines += [f"images, {stage}: {found} of {wanted} runs" for stage, found, wanted in progress(patches, main)]
    lines += [
        f"modular addition p = {r['config']['p']}, {r['config']['arm']}, seed {r['config']['seed']}: reached epoch "
        f"{r['reached']:,} of {r['config']['epochs']:,}"
        for r in grokking if r["reached"] < r["config"]["epochs"]
    ]  # fmt: skip
    pairs = {lr: len(differences(arms, OURS, BASELINE)) for lr, arms in by_peak(tuned).items()}
    lines += [f"fine-tuning, lr {lr:g}: {n} of {OTHER_PAIRS} pairs" for lr, n in pairs.items() if n < OTHER_PAIRS]
    return "\n".join(f"- {line}" for line in lines) or "Nothing."


def progress(patches: Sequence[Record], main: dict) -> Iterator[tuple[str, int, int]]:
    """(stage, finished, planned) of every stage that is not done."""
    done = {key(record["config"]) for record in patches}
    lr = dict.fromkeys(ARMS, 0.0) | chosen_lr(patches, main)
    for name, stage in STAGES.items():
        planned = [key(config) for config in stage(main, lr)]
        found = len(done.intersection(planned))
        if found < len(planned):
            yield name, found, len(planned)


def provenance_words(records: Sequence[Record]) -> str:
    """Commits and package versions that the runs were made with."""
    commits = sorted({f"{(r['commit'] or 'no repository')[:10]}{' + changes' if r['dirty'] else ''}" for r in records})
    versions = sorted({", ".join(f"{name} {value}" for name, value in r["versions"].items()) for r in records})
    return f"{len(records)} runs; commits {', '.join(commits)}; {'; '.join(versions)}."


def claims(folder: Path) -> str:
    """The summary table."""
    patches, grokking, tuned = records_of(folder)
    ended = [record for record in grokking if record["reached"] == record["config"]["epochs"]]
    return summary([*patch_claims(patches), *grokking_claims(ended), *finetune_claims(tuned)])


def report(folder: Path) -> str:
    """The whole report as Markdown, pictures by their names."""
    patches, grokking, tuned = records_of(folder)
    parts = [
        "# Evidence",
        provenance_words([*patches, *grokking, *tuned]),
        claims(folder),
        RULES,
        "## Missing",
        missing(patches, grokking, tuned),
    ]
    if pairs_only(patches):
        main = main_configuration(patches)
        parts += [
            "## Images", f"Main configuration (`patches` above): {described(main)}.", NOTES,
            "### Learning rates: validation accuracy, %", grid_section(patches, main),
            "### Gain over AdamW", arms_section(patches, main), "![](pairs.png) ![](pair_lines.png)",
            "### Ablation ladder and price of freezing", ladder_section(patches, main),
            "### Movement per step", movement_section(patches, main), "![](movement.png)",
            "### Weight decay × data", sweep_section(patches, main), "![](phase.png)",
            "### Other configurations", other_section(patches, main),
        ]  # fmt: skip
    if grokking:
        parts += ["## Modular addition", grokking_section(grokking), "![](grokking.png)"]
    if tuned:
        parts += ["## Fine-tuning a pretrained ViT", finetune_section(tuned)]
    return "\n\n".join(parts) + "\n"


def draw(folder: Path) -> None:
    """The pictures that the runs allow."""
    patches, grokking, _ = records_of(folder)
    if pairs_only(patches):
        main = main_configuration(patches)
        arms = by_arm(patches, main)
        draw_pairs(arms, folder / "pairs.png")
        draw_movement(arms, folder / "movement.png")
        if sweep(patches, main):
            draw_pair_lines(arms, folder / "pair_lines.png")
            draw_phase(sweep(patches, main), folder / "phase.png")
    if grokking:
        draw_grokking(grokking, folder / "grokking.png")


def put_between(text: str, fragment: str) -> str:
    """README with the fragment between its two markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise BadInput(f"README must hold {START} and, after it, {END}: it does not; add the two lines")
    return f"{before}{START}\n{fragment}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", nargs="?", type=Path, const=RESULTS.parents[1] / "README.md")
    args = parser.parse_args(argv)
    draw(args.results)
    text = report(args.results)
    write_atomically(args.results / "REPORT.md", lambda part: _fill(part, text))
    if args.readme:
        try:
            readme = put_between(args.readme.read_text(encoding="utf-8"), claims(args.results))
        except BadInput as error:
            print(f"report: {error}", file=sys.stderr)
            return 2
        write_atomically(args.readme, lambda part: _fill(part, readme))
    return 0


def _fill(part: Path, text: str) -> None:
    part.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
