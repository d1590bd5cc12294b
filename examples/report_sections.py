"""The sections of the evidence report, each a Markdown table made from the finished runs."""

from collections.abc import Mapping, Sequence

import numpy as np
from claims import Claim
from evidence import (
    BASELINE,
    OURS,
    by_arm,
    by_peak,
    common,
    described,
    differences,
    interval,
    movement_ratio,
    pairs_only,
    ratio,
    side,
    sweep,
    with_endpoints,
)  # fmt: skip
from harness import Record, key
from paired_statistics import NOT_TESTABLE, paired
from patch_stages import FIRST_GRID_SEED, chosen_lr

LADDER = (
    ("the start", "adamw", "adamw_default_init"),
    ("freezing, against AdamW", "adamw", "frozen"),
    ("freezing, against the fixed step", "fixed_step", "frozen"),
    ("freezing, against geoopt's step", "geoopt_adam", "frozen"),
    ("freezing, against ours", OURS, "frozen"),
    ("the manifold, with geoopt's step", "geoopt_adam", "adamw"),
    ("ours, against geoopt's step", OURS, "geoopt_adam"),
    ("scale free, against the fixed step", OURS, "fixed_step"),
    ("the fixed step's length", "fixed_step_long", "fixed_step"),
    ("scale free, against the long fixed step", OURS, "fixed_step_long"),
    ("projector: embedded against canonical", OURS, "scale_free_canonical"),
    ("equivariance: one scalar against element-wise", OURS, "scale_free_elementwise"),
    ("trust region: capped against uncapped", OURS, "scale_free_uncapped"),
)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def summary(claims: Sequence[Claim]) -> str:
    """Claim, our configuration, our figure with interval, verdict."""
    return table(("the paper's claim", "our runs", "our figure, 95 % interval", "verdict"), claims)


def grid_section(records: Sequence[Record], main: dict) -> str:
    """Validation accuracy of every arm at every learning rate, and what was chosen."""
    chosen, scores = chosen_lr(records, main), {}
    for record in records:
        if record["config"]["seed"] >= FIRST_GRID_SEED and common(record["config"]) == main:
            scores.setdefault((record["config"]["arm"], record["config"]["lr"]), []).append(record["val_accuracy"])
    rates = sorted({lr for _, lr in scores})

    def cell(arm: str, lr: float) -> str:
        return f"{100 * np.mean(scores[arm, lr]):.1f}" if (arm, lr) in scores else "–"

    rows = [
        [
            arm,
            *(cell(arm, lr) for lr in rates),
            f"{best:g}",
            "edge of the grid" if best in (rates[0], rates[-1]) else "",
        ]
        for arm, best in chosen.items()
    ]
    return table(("arm", *(f"lr {lr:g}" for lr in rates), "chosen", ""), rows)


def arms_section(records: Sequence[Record], main: dict) -> str:
    """What each arm reached, and its difference to AdamW."""
    rows = []
    for arm, runs in by_arm(records, main).items():
        scores = [100 * run["test_accuracy"] for run in runs.values()]
        against = paired(differences(by_arm(records, main), arm, BASELINE))
        tests = f"{against.sd:.2f} | {against.t:.2f} | {against.wins}/{against.n} | {against.wilcoxon_p:.3f}"
        gain = interval(against) if arm != BASELINE else "–"
        rows.append(
            [arm, len(runs), f"{np.mean(scores):.2f}", gain, *(tests.split(" | ") if arm != BASELINE else "––––")]
        )
    return table(("arm", "runs", "test accuracy, %", "minus adamw, points", "sd", "t", "won", "Wilcoxon p"), rows)


def ladder_section(records: Sequence[Record], main: dict) -> str:
    """One change at a time."""
    arms = by_arm(records, main)
    rows = [(what, f"{one} − {other}", interval(paired(differences(arms, one, other)))) for what, one, other in LADDER]
    capped = sum(run["capped"] for run in arms.get(OURS, {}).values())
    return table(("what", "arms", "points"), rows) + f"\n\nSteps that the trust region shortened in `{OURS}`: {capped}."


def movement_section(records: Sequence[Record], main: dict) -> str:
    """Movement of every arm, and AdamW's beside it per unit of lr."""
    arms = by_arm(records, main)
    rows = []
    for arm, runs in arms.items():
        moved = np.median([run["movement"] for run in runs.values()])
        far = np.median([run["travelled"] for run in runs.values()])
        against = ratio(movement_ratio(arms, BASELINE, arm)) if arm not in (BASELINE, "frozen") else "–"
        rows.append((arm, f"{moved:.1e}", f"{far:.3f}", against))
    return table(("arm", "RMS per step", "‖W_end − W_start‖/‖W_start‖", "AdamW moves farther by, per unit of lr"), rows)


def sweep_section(records: Sequence[Record], main: dict) -> str:
    """Gain over weight decay × images, and the spectra of the two arms."""
    rows = []
    for (decay, images), gains in sweep(records, main).items():
        arms = by_arm(records, {**main, "decay": decay, "images": images})
        spectra = [spectrum_words(list(arms[arm].values())) for arm in (BASELINE, OURS)]
        scores = [
            f"{100 * np.mean([run['test_accuracy'] for run in arms[arm].values()]):.1f}" for arm in (BASELINE, OURS)
        ]
        rows.append((f"{decay:g}", f"{images:,}", *scores, interval(paired(gains)), *spectra))
    head = ("decay", "images", "adamw, %", "ours, %", "gain, points", "adamw: σ(W), rank of QKᵀ", "ours")
    return f"{table(head, rows)}\n\n{dominance(sweep(records, main))}"


def dominance(cells: Mapping[tuple[float, int], Sequence[float]]) -> str:
    """Where the interval of the gain leaves 0 out."""
    found: dict[str, list[str]] = {"ahead": [], "behind": [], "level": [], NOT_TESTABLE: []}
    for (decay, images), gains in cells.items():
        found[side(paired(gains))].append(f"{decay:g} × {images:,}")
    words = {where: ", ".join(names) or "nowhere" for where, names in found.items()}
    few = f"; with too few pairs: {words[NOT_TESTABLE]}" if found[NOT_TESTABLE] else ""
    return (
        f"`{OURS}` is ahead of AdamW (interval above 0) at decay × images: {words['ahead']}; behind (below 0): "
        f"{words['behind']}; 0 is inside the interval: {words['level']}{few}."
    )


def spectrum_words(runs: Sequence[Record]) -> str:
    """Largest and smallest singular value, and effective rank of W_Q·W_Kᵀ, at the end; medians over the runs."""
    low, high, rank = (np.median([run["spectrum"][n] for run in runs]) for n in ("smallest", "largest", "product_rank"))
    return f"{low:.2f} … {high:.2f}, {rank:.1f}"


def other_section(records: Sequence[Record], main: dict) -> str:
    """Configurations outside the phase diagram: longer runs, larger images."""
    rows = []
    configurations = {key(common(r["config"])): common(r["config"]) for r in pairs_only(records)}
    for configuration in configurations.values():
        gains = differences(by_arm(records, configuration), OURS, BASELINE)
        if gains and {**configuration, "decay": main["decay"], "images": main["images"]} != main:
            rows.append((described(configuration), interval(paired(gains))))
    return table(("configuration", "gain over AdamW, points"), rows) if rows else "None yet."


def grokking_section(records: Sequence[Record]) -> str:
    """Each run of modular addition."""
    rows = [
        (r["config"]["p"], r["config"]["width"], r["config"]["arm"], r["config"]["seed"],
         f"{r['reached']:,} of {r['config']['epochs']:,}", f"{100 * r['endpoint']:.1f}", f"{r['held']:.0%}",
         r["collapses"],
         f"{r['rows'][-1]['smallest']:.3f} … {r['rows'][-1]['largest']:.3f}")
        for r in with_endpoints(records)
    ]  # fmt: skip
    head = (
        "p",
        "width",
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
        scores = [f"{100 * np.mean([run['test_accuracy'] for run in arms[arm].values()]):.1f}" if arm in arms else "–"
                  for arm in (BASELINE, OURS)]  # fmt: skip
        rows.append((f"{lr:g}", *scores, interval(paired(differences(arms, OURS, BASELINE)))))
    config = records[0]["config"]
    words = (
        f"{config['model']} with {config['checkpoint'] or 'its own weights'} at {config['img_size']} px, "
        f"{config['images']:,} images of {config['data']}, {config['epochs']} epochs; "
        f"{config['test_images']:,} test images."
    )
    return f"{words}\n\n{table(('peak lr', 'adamw, %', 'patched with ours, %', 'gain, points'), rows)}"
