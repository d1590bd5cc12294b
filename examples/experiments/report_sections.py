"""The tables of the results page, each Markdown made from the finished runs."""

from collections.abc import Mapping, Sequence

import numpy as np

from .claims import Claim
from .evidence import (
    BASELINE,
    OURS,
    by_arm,
    by_peak,
    common,
    described,
    differences,
    interval,
    pairs_only,
    sweep,
    with_endpoints,
)
from .frame_steps import ARMS
from .harness import Config, Record, key
from .paired_statistics import AHEAD, BEHIND, LEVEL, NOT_TESTABLE, UNDECIDED, Paired, paired, side
from .patch_evidence import SIZES, Cell, PatchRuns, passes, range_of_k, screen, tuning_curves
from .patch_stages import BASE_IMAGES, HEADLINE, MANY_IMAGES, WORTH


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def summary(claims: Sequence[Claim]) -> str:
    """Claim, our configuration, our figure with interval, verdict."""
    return table(("claim (the paper's unless marked)", "our runs", "our figure, 95 % interval", "verdict"), claims)


def screen_section(runs: PatchRuns) -> str:
    """Which configurations can test the paper at all."""
    rows = [
        (name, f"{lr:g}", f"{frozen:.1f}", f"{trained:.1f}", f"{trained - frozen:+.1f}",
         "yes" if passes(frozen, trained) else "no")
        for name, lr, frozen, trained in screen(runs)
    ]  # fmt: skip
    return table(
        ("configuration", "lr of the rest", "frozen, %", "best trained, %", "worth, points", f"≥ {WORTH:g}"), rows
    )


def tuning_section(runs: PatchRuns, images: int) -> str:
    """Validation accuracy of every arm by lr of the rest and k; the best in bold."""
    curves = tuning_curves(runs, images)
    ks = sorted({k for curve in curves.values() for k in curve})
    best = {arm: max(max(curve.values()) for (name, _), curve in curves.items() if name == arm) for arm, _ in curves}

    def cell(arm: str, curve: Mapping[float, list[float]], k: float) -> str:
        if k not in curve:
            return ""
        return f"**{curve[k][0]:.1f}**" if curve[k] == best[arm] else f"{curve[k][0]:.1f}"

    rows = [(arm, f"{lr:g}", *(cell(arm, curve, k) for k in ks)) for (arm, lr), curve in curves.items()]
    return table(("arm", "lr of the rest", *(f"k = {k:g}" for k in ks)), rows)


def range_section(runs: PatchRuns) -> str:
    """How much k may be off: the range within one point of the best, per arm, lr and size."""
    curves = [
        (f"{images:,} (validation, one seed)", arm, lr, curve)
        for images in (BASE_IMAGES, MANY_IMAGES)
        for (arm, lr), curve in tuning_curves(runs, images).items()
    ]
    curves += [
        (f"{images:,} (test, at least {min(map(len, curve.values()))} seeds)", arm, runs.rest_lr(), curve)
        for images in SIZES for arm in HEADLINE if (curve := runs.curve(images, arm, runs.rest_lr()))
    ]  # fmt: skip
    rows = []
    for where, arm, lr, curve in curves:
        if len(curve) < 3:
            continue
        low, high = range_of_k(curve)
        edge = ", at the edge of the grid" if low == min(curve) or high == max(curve) else ""
        best = max(curve, key=lambda k: float(np.mean(curve[k])))
        rows.append((where, arm, f"{lr:g}", f"{best:g}", f"{lr * best:.2g}", f"{low:g} … {high:g}{edge}"))
    return table(
        ("images", "arm", "lr of the rest", "best k", "lr of queries and keys", "k within a point of it"), rows
    )


def phase_words(cells: Mapping[tuple[float, int], Sequence[float]]) -> str:
    """Where the interval of ours − AdamW leaves 0 out."""
    found: dict[str, list[str]] = {verdict: [] for verdict in (AHEAD, BEHIND, LEVEL, UNDECIDED, NOT_TESTABLE)}
    for (k, images), gains in cells.items():
        found[side(paired(gains))].append(f"{k:g} × {images:,}")
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in found.items() if names) + "."


def arms_section(runs: PatchRuns, images: int) -> str:
    """What each arm reached as tuned, and its difference to AdamW."""
    rows = []
    for arm in ARMS:
        cell = runs.tuned(images, arm)
        values = [100 * v for v in runs.values(cell).values()]
        if values:
            against = runs.gain(cell, runs.tuned(images, "adamw"))
            moved, far, defect = (np.median(list(runs.values(cell, name).values())) for name in
                                  ("movement", "travelled", "defect"))  # fmt: skip
            gain = "–" if arm == BASELINE else interval(against)
            rows.append((arm, f"{cell.lr:g}", f"{cell.k:g}", len(values), f"{np.mean(values):.2f}", gain,
                         f"{moved:.1e}", f"{far:.2f}", f"{defect:.0e}"))  # fmt: skip
    head = ("arm", "lr", "k", "runs", "test accuracy, %", "minus adamw, points", "movement per step",
            "‖W_end − W_start‖/‖W_start‖", "defect")  # fmt: skip
    return table(head, rows)


def _mean(runs: Mapping[int, Record]) -> str:
    return f"{100 * np.mean([run['test_accuracy'] for run in runs.values()]):.2f}"


def old_section(records: Sequence[Record], main: Config) -> str:
    """The 16-pixel runs: every arm against AdamW, and weight decay × data."""
    arms = by_arm(records, main)
    rows = [
        (arm, len(runs), _mean(runs), interval(paired(differences(arms, arm, BASELINE))))
        for arm, runs in arms.items() if arm != BASELINE
    ]  # fmt: skip
    swept = sweep(records, main).items()
    cells = [(f"{decay:g}", f"{images:,}", interval(paired(gains))) for (decay, images), gains in swept]
    found = {key(common(r["config"])): common(r["config"]) for r in pairs_only(records)}
    configurations = sorted(found.values(), key=lambda c: (c["steps"], c["images"], c["decay"]))
    longer = [
        (f"{c['steps']:,}", f"{c['images']:,}", f"{c['decay']:g}", interval(paired(gains)))
        for c in configurations
        if c["steps"] != main["steps"] and (gains := differences(by_arm(records, c), OURS, BASELINE))
    ]
    return "\n\n".join([
        f"{described(main)}: {len(pairs_only(records))} paired runs.",
        table(("arm", "runs", "test accuracy, %", "minus adamw, points"), rows),
        table(("weight decay", "images", "scale_free − adamw, points"), cells),
        "Other numbers of steps and images:",
        table(("steps", "images", "weight decay", "scale_free − adamw, points"), longer),
    ])  # fmt: skip


def grokking_section(records: Sequence[Record]) -> str:
    """Stability of every run of modular addition."""
    rows = [
        (r["config"]["p"], f"{r['config']['decay']:g}", r["config"]["arm"], r["config"]["seed"],
         f"{r['reached']:,} of {r['config']['epochs']:,}",
         f"{100 * r['endpoint']:.1f}", f"{r['held']:.0%}", r["collapses"],
         f"{r['rows'][-1]['smallest']:.3f} … {r['rows'][-1]['largest']:.3f}")
        for r in with_endpoints(records)
    ]  # fmt: skip
    head = (
        "p",
        "decay",
        "arm",
        "seed",
        "epochs",
        "final validation, %",
        "late epochs above 90 %",
        "collapses",
        "σ(Q, K) at the end",
    )
    return table(head, rows)


def finetune_section(records: Sequence[Record]) -> str:
    """Fine-tuning in pairs: both arms at every learning rate."""
    rows = []
    for lr, arms in by_peak(records).items():
        scores = [_mean(arms[arm]) if arm in arms else "–" for arm in (BASELINE, OURS)]
        rows.append((f"{lr:g}", *scores, interval(paired(differences(arms, OURS, BASELINE)))))
    config = records[0]["config"]
    words = (
        f"{config['model']} with {config['checkpoint'] or 'its own weights'} at {config['img_size']} px, "
        f"{config['images']:,} images of {config['data']}, {config['epochs']} epochs; "
        f"{config['test_images']:,} test images."
    )
    return f"{words}\n\n{table(('peak lr', 'adamw, %', 'patched with ours, %', 'gain, points'), rows)}"


def answers(runs: PatchRuns) -> str:
    """What do I gain, when, what does it cost, what lr do I set: from the runs alone."""
    sizes = [
        n for n in (BASE_IMAGES, MANY_IMAGES) if runs.differences(runs.tuned(n, "scale_free"), runs.tuned(n, "adamw"))
    ]
    worth = [_words(runs, n, "frozen", "freezing queries and keys") for n in sizes]
    gains = [_words(runs, n, "adamw", "AdamW") for n in sizes]
    ours, theirs = Cell(BASE_IMAGES, "scale_free", 1e-3, 1.0), Cell(BASE_IMAGES, "adamw", 1e-3, 1.0)
    raised = [f"{name} {interval(runs.gain(cell._replace(k=10.0), cell), ' points')}"
              for name, cell in (("ours", ours), ("AdamW", theirs))]  # fmt: skip
    seconds = runs.ratio(runs.tuned(BASE_IMAGES, "scale_free"), runs.tuned(BASE_IMAGES, "adamw"), "seconds")
    rates = sorted({(lr, max(curve, key=lambda k: curve[k][0])) for (arm, lr), curve in
                    tuning_curves(runs, BASE_IMAGES).items() if arm == "scale_free"})  # fmt: skip
    lrs = "; ".join(f"lr {lr:g} of the rest: k = {k:g}, so {lr * k:.2g}" for lr, k in rates)
    return "\n".join([
        f"- **What do I gain?** Over AdamW, both tuned: {'; '.join(gains)}.",
        f"- **When?** Where training queries and keys is worth something at all. It is worth, over freezing them, both "
        f"tuned: {'; '.join(worth)}.",
        f"- **What does it cost?** A run took {seconds.mean:.2f}× [{seconds.low:.2f}, {seconds.high:.2f}] of AdamW's "
        f"time (n = {seconds.n}, shared CPU), with half of its state for queries and keys.",
        f"- **What lr do I set?** Best on {BASE_IMAGES:,} images: {lrs} for queries and keys. If the rest stays at an "
        f"untuned 1e-3, ten times the lr for queries and keys alone gives {', '.join(raised)}.",
    ])  # fmt: skip


def _words(runs: PatchRuns, images: int, arm: str, name: str) -> str:
    gain: Paired = runs.gain(runs.tuned(images, "scale_free"), runs.tuned(images, arm))
    return f"{interval(gain, ' points')} at {images:,} images ({side(gain)})"
