"""The paper's claims beside our figures, with the verdicts that follow from the runs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from evidence import (
    BASELINE,
    HELD,
    OURS,
    by_arm,
    by_peak,
    differences,
    equal_epochs,
    equal_steps,
    interval,
    main_configuration,
    movement_ratio,
    pairs_only,
    ratio,
    side,
    slopes,
    with_endpoints,
)  # fmt: skip
from harness import Config, Record
from paired_statistics import (
    FEWEST,
    NOT_REPRODUCED,
    NOT_TESTABLE,
    REPRODUCED,
    SAME,
    Paired,
    equal_verdict,
    gain_verdict,
    paired,
    value_verdict,
)
from patch_stages import DECAYS, EPOCHS


class Claim(NamedTuple):
    """One row of the summary."""

    claim: str
    configuration: str
    figure: str
    verdict: str


def patch_claims(records: Sequence[Record]) -> list[Claim]:
    """The paper's claims about images, each with our figure."""
    if not pairs_only(records):
        return []
    main = main_configuration(records)
    arms, where = by_arm(records, main), "patches"

    def gain(one: str, other: str) -> Paired:
        return paired(differences(arms, one, other))

    main_gain, start, scale = gain(OURS, BASELINE), gain(OURS, "adamw_default_init"), gain(OURS, "fixed_step")
    frozen, moves = gain("fixed_step", "frozen"), movement_ratio(arms, BASELINE, "fixed_step")
    geoopt, short = movement_ratio(arms, BASELINE, "geoopt_adam"), gain(OURS, "geoopt_adam")
    projector, entries = gain(OURS, "scale_free_canonical"), gain(OURS, "scale_free_elementwise")
    steps = equal_steps(records, main)
    few, many = (equal_epochs(records, main, decay) for decay in (main["decay"], max(DECAYS)))
    t = f", t = {main_gain.t:.1f}, {main_gain.wins}/{main_gain.n} won" if main_gain.n > 1 else ""

    def widens(claim: str, over: Sequence[Config], condition: str) -> Claim:
        slope = paired(slopes(records, over))
        sizes = ", ".join(f"{configuration['images']:,}" for configuration in over) or "no"
        figure = interval(slope, " points per doubling")
        return Claim(claim, f"{where}, {sizes} images, {condition}", figure, gain_verdict(slope, 0.0))

    return [
        Claim("+8.98 points over AdamW, 12 paired starts (t = 60.6, 12/12)", where,
              interval(main_gain, " points") + t, gain_verdict(main_gain, 8.98)),
        Claim("up to +6.79 points over AdamW (earlier paper), read as AdamW from its usual start", where,
              interval(start, " points"), gain_verdict(start, 6.79)),
        widens("the gap widens with data", steps, f"{main['steps']:,} steps each"),
        widens("the same, in equal epochs", few, f"{EPOCHS} epochs each"),
        widens("the same, in equal epochs at more decay", many, f"{EPOCHS} epochs each, decay {max(DECAYS):g}"),
        Claim("a fixed Riemannian step moves 24–40× less than AdamW", where, ratio(moves),
              value_verdict(moves, 24, 40)),
        Claim("the same, where the Riemannian step is geoopt's RiemannianAdam", f"{where}, geoopt_adam", ratio(geoopt),
              value_verdict(geoopt, 24, 40)),
        Claim("freezing the frames costs 0.28 points (against the fixed step)", where, interval(frozen, " points"),
              value_verdict(frozen, 0.28, 0.28, SAME)),
        Claim("the whole gain comes from making the step scale free", f"{where}, against fixed_step",
              interval(scale, " points"), gain_verdict(scale, 0.0)),
        Claim("the same, against geoopt's step", f"{where}, against geoopt_adam",
              interval(short, " points"), gain_verdict(short, 0.0)),
        Claim("nothing measurable comes from the projector", f"{where}, embedded − canonical",
              interval(projector, " points"), equal_verdict(projector)),
        Claim("nothing measurable comes from equivariance", f"{where}, one scalar − element-wise",
              interval(entries, " points"), equal_verdict(entries)),
    ]  # fmt: skip


def grokking_claims(records: Sequence[Record]) -> list[Claim]:
    """The paper's claims about modular addition."""
    if not records:
        return []
    records = with_endpoints(records)
    main = main_configuration(records)
    arms = by_arm(records, main)
    where = f"p = {main['p']}, width {main['width']}, {main['epochs']:,} epochs"
    end, late = (paired(differences(arms, OURS, BASELINE, metric)) for metric in ("endpoint", "held"))
    full = main["epochs"] >= 20_000  # a shorter run says nothing about the claimed epoch
    ours = list(arms.get(OURS, {}).values())
    fallen, spread = sum(r["collapses"] > 0 for r in ours), max((r["spread"] for r in ours), default=math.nan)
    if len(ours) < FEWEST:
        survive = NOT_TESTABLE
    else:
        survive = REPRODUCED if 2 * fallen >= len(ours) and spread < 1e-4 else NOT_REPRODUCED
    return [
        Claim("97.0 % against 61.1 % at epoch 20,000 (one run): +35.9 points", where,
              interval(end, " points at the end"), gain_verdict(end, 35.9) if full else NOT_TESTABLE),
        Claim("generalisation holds longer", where, interval(late, f" points of the late epochs above {HELD:.0%}"),
              gain_verdict(late, 0.0)),
        Claim("decay drives collapse cycles through the rest while the frames survive", where,
              f"{fallen} of {len(ours)} runs collapsed; singular values within {max(spread, 1e-5):.0e}", survive),
    ]  # fmt: skip


def finetune_claims(records: Sequence[Record]) -> list[Claim]:
    """Our own question, which the paper leaves open: what patching does to the fine-tuning of a pretrained ViT."""
    if not records:
        return []
    at_each = {lr: paired(differences(arms, OURS, BASELINE)) for lr, arms in by_peak(records).items()}
    gains = {lr: gain for lr, gain in at_each.items() if gain.n}
    figure = "; ".join(f"lr {lr:g}: {interval(gain)}" for lr, gain in gains.items())
    sides = {side(gain) for gain in gains.values()} - {NOT_TESTABLE} or {NOT_TESTABLE}
    return [Claim("(not in the paper) fine-tuning a pretrained ViT-S gains", "finetune", f"points at {figure}",
                  sides.pop() if len(sides) == 1 else "depends on lr")]  # fmt: skip
