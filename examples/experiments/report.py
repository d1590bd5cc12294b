"""From the finished runs in examples/results/*.jsonl to docs/results.md and its pictures.

    python examples/experiment.py report

Rewrites what is between <!-- evidence --> and <!-- /evidence --> on that page, and docs/figures/*.png. Nothing there is
typed in by hand: figures, verdicts and answers follow from the runs by the rules of paired_statistics.py.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from finetuning import run_record
from finetuning.atomic_files import write_atomically
from finetuning.bad_input import BadInput

from .claims import finetune_claims, grokking_claims, old_claims, patch_claims
from .evidence import NO_RUNS, OURS, by_peak, differences, main_configuration, pairs_only
from .evidence_plots import arms_against_adamw, draw_curves, draw_grokking, draw_pairs, draw_phase, draw_tuning
from .harness import RESULTS, Record, key, read_records
from .paired_statistics import RULES
from .patch_evidence import SIZES, Cell, PatchRuns, tuning_curves
from .patch_stages import BASE_IMAGES, MANY_IMAGES, OTHER_PAIRS, STAGES, NotTuned
from .report_sections import (
    answers,
    arms_section,
    finetune_section,
    grokking_section,
    old_section,
    phase_words,
    range_section,
    screen_section,
    summary,
    tuning_section,
)  # fmt: skip
from .scratch_report import scratch_claims, scratch_section

START, END = "<!-- evidence -->", "<!-- /evidence -->"
PAGE = RESULTS.parents[1] / "docs" / "results.md"


class Evidence(NamedTuple):
    """All finished runs; those of modular addition that stopped early as far as they got."""

    patches: PatchRuns
    old: list[Record]
    grokking: list[Record]
    tuned: list[Record]
    scratch: list[Record]

    @classmethod
    def of(cls, folder: Path) -> "Evidence":
        grokking = read_records(folder / "grokking.jsonl")
        done = {key(record["config"]) for record in grokking}
        unfinished = [r for r in read_records(folder / "grokking.partial.jsonl") if key(r["config"]) not in done]
        old, tuned = read_records(folder / "patches_16px.jsonl"), read_records(folder / "finetune.jsonl")
        patches, scratch = (read_records(folder / f"{name}.jsonl") for name in ("patches", "scratch"))
        return cls(PatchRuns(patches), old, grokking + unfinished, tuned, scratch)

    def ended(self) -> list[Record]:
        return [record for record in self.grokking if record["reached"] == record["config"]["epochs"]]


def missing(evidence: Evidence) -> str:
    """What the stages hold and the runs do not, counted."""
    lines = [f"images, stage `{stage}`: {words}" for stage, words in progress(evidence.patches)]
    lines += [
        f"modular addition p = {r['config']['p']}, {r['config']['arm']}, seed {r['config']['seed']}: dropped at epoch "
        f"{r['reached']:,} of {r['config']['epochs']:,}"
        for r in evidence.grokking if r["reached"] < r["config"]["epochs"]
    ]  # fmt: skip
    pairs = {lr: len(differences(arms, OURS, "adamw")) for lr, arms in by_peak(evidence.tuned).items()}
    lines += [f"fine-tuning, lr {lr:g}: {n} of {OTHER_PAIRS} pairs" for lr, n in pairs.items() if n < OTHER_PAIRS]
    return "\n".join(f"- {line}" for line in lines) or "Nothing."


def progress(runs: PatchRuns) -> Iterator[tuple[str, str]]:
    """Every stage that is not done, with its finished and planned runs."""
    done = {key(record["config"]) for record in runs.records}
    for name, stage in STAGES.items() if runs.cells else ():
        try:
            planned = {key(config) for config in stage(runs.common, runs.records)}
        except NotTuned:
            yield name, "its arms are not tuned yet"
            continue
        if planned - done:
            yield name, f"{len(planned & done)} of {len(planned)} runs"


def phase(runs: PatchRuns) -> dict[tuple[float, int], list[float]]:
    """{(k, images): ours − AdamW at the same learning rates}."""
    lr = runs.rest_lr()
    cells = {(cell.k, cell.images) for cell in runs.cells if cell.arm == OURS and cell.lr == lr}
    gains = {(k, n): runs.differences(Cell(n, OURS, lr, k), Cell(n, "adamw", lr, k)) for k, n in sorted(cells)}
    return {cell: differences for cell, differences in gains.items() if differences}


def sizes(runs: PatchRuns) -> list[int]:
    """The sizes with pairs at the lr of the rest that the curves are drawn at."""
    return [images for images in SIZES if runs.curve(images, OURS, runs.rest_lr())]


def provenance_words(records: Sequence[Record]) -> str:
    """Commits and package versions that the runs were made with."""
    commits = sorted({f"{(r['commit'] or 'no repository')[:10]}{' + changes' if r['dirty'] else ''}" for r in records})
    versions = sorted({", ".join(f"{name} {value}" for name, value in r["versions"].items()) for r in records})
    return f"{len(records)} runs; commits {', '.join(commits)}; {'; '.join(versions)}."


def images_part(runs: PatchRuns) -> list[str]:
    lr = runs.rest_lr()
    config = runs.common
    words = (
        f"Configuration: {config['data']}, {config['side']} px in {config['patch']}×{config['patch']} patches, "
        f"d = {config['width']}, {config['depth']} layers, {config['heads']} heads, learned positions from a standard "
        f"deviation of 1, pure frames without gain; batch {config['batch']}, 8 epochs, decay {config['decay']:g}."
    )
    parts = ["## In short", answers(runs)]
    if sizes(runs):
        parts += ["![Accuracy against k](figures/curves.png)",
                  f"Test accuracy at lr {lr:g} of the rest; bands from the worst seed to the best.",
                  "![Ours minus AdamW over k and data](figures/phase.png)",
                  phase_words(phase(runs))]  # fmt: skip
    parts += ["![Every arm](figures/arms.png)", "## Images: details", words, "### The screen", screen_section(runs)]
    for images in (BASE_IMAGES, MANY_IMAGES):
        parts += [f"### Tuning at {images:,} images: validation accuracy, %, one seed", tuning_section(runs, images)]
        if images == BASE_IMAGES and any(len(curve) > 2 for curve in tuning_curves(runs, images).values()):
            parts += ["![Validation accuracy by lr](figures/tuning.png)"]
        parts += [f"### Arms as tuned, {images:,} images", arms_section(runs, images)]
    parts += ["### How far k may be off", range_section(runs)]
    for name, other in runs.others():
        parts += [f"### The same with {name}", summary([c for c in patch_claims(other) if c.figure != NO_RUNS])]
        parts += [f"Arms as tuned, {BASE_IMAGES:,} images; tuning, validation accuracy, %, one seed:",
                  arms_section(other, BASE_IMAGES), tuning_section(other, BASE_IMAGES)]  # fmt: skip
    return parts


def body(evidence: Evidence) -> str:
    """Everything between the markers."""
    runs, grokking = evidence.patches, evidence.ended()
    claims = [
        *patch_claims(runs),
        *grokking_claims(grokking),
        *scratch_claims(evidence.scratch),
        *finetune_claims(evidence.tuned),
        *old_claims(evidence.old),
    ]
    images = images_part(runs) if runs.cells else []
    cut = images.index("## Images: details") if images else 0
    parts = [*images[:cut], "## Claims and verdicts", summary(claims), RULES, *images[cut:]]
    if evidence.old:
        parts += ["## Where queries and keys do not matter: 16 pixels",
                  old_section(evidence.old, main_configuration(pairs_only(evidence.old)))]  # fmt: skip
    if grokking:
        parts += ["## Modular addition", "![Validation accuracy of every run by epoch](figures/grokking.png)",
                  grokking_section(evidence.grokking)]  # fmt: skip
    if evidence.scratch:
        parts += ["## A timm ViT from scratch", scratch_section(evidence.scratch)]
    if evidence.tuned:
        parts += ["## Fine-tuning a pretrained ViT", finetune_section(evidence.tuned)]
    everything = [*runs.records, *evidence.old, *evidence.grokking, *evidence.tuned, *evidence.scratch]
    return "\n\n".join([*parts, "## Not run yet", missing(evidence), "## Provenance", provenance_words(everything)])


def draw(evidence: Evidence, folder: Path) -> None:
    """The pictures that the runs allow."""
    runs = evidence.patches
    if runs.cells:
        if any(len(curve) > 2 for curve in tuning_curves(runs, BASE_IMAGES).values()):
            draw_tuning(runs, BASE_IMAGES, folder / "tuning.png")
        draw_pairs(arms_against_adamw(runs), folder / "arms.png")
        if sizes(runs):
            draw_curves(runs, sizes(runs), folder / "curves.png")
            draw_phase(phase(runs), "k", folder / "phase.png")
    if pair := first_pair(evidence.tuned):
        run_record.draw_curves(pair, folder / "finetune_vit_s.png")
    if evidence.ended():
        draw_grokking(evidence.ended(), folder / "grokking.png")


def first_pair(records: Sequence[Record]) -> list[run_record.Row]:
    """The epochs of both arms of the first pair at the peak lr that most pairs have."""
    at_peak = max(by_peak(records).values(), key=lambda arms: len(differences(arms, OURS, "adamw")), default={})
    seeds = at_peak.get(OURS, {}).keys() & at_peak.get("adamw", {}).keys()
    return [row for arm in (OURS, "adamw") for row in at_peak[arm][min(seeds)]["rows"]] if seeds else []


def put_between(text: str, fragment: str) -> str:
    """The page with the fragment between its two markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise BadInput(f"the page must hold {START} and, after it, {END}: it does not; add the two lines")
    return f"{before}{START}\n\n{fragment}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    evidence = Evidence.of(args.results)
    try:
        text = put_between(args.page.read_text(encoding="utf-8"), body(evidence))
    except BadInput as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    draw(evidence, args.page.parent / "figures")
    write_atomically(args.page, lambda part: part.write_text(text, encoding="utf-8"))
    return 0
