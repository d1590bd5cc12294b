"""The paper's claims beside our figures, with the verdicts that follow from the runs."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .evidence import (
    BASELINE,
    HELD,
    OURS,
    by_arm,
    by_k,
    by_peak,
    common,
    differences,
    interval,
    main_configuration,
    ratio,
    with_endpoints,
)
from .harness import Config, Record, key
from .paired_statistics import (
    FEWEST,
    NOT_REPRODUCED,
    NOT_TESTABLE,
    REPRODUCED,
    SAME,
    UNDECIDED,
    equal_verdict,
    gain_verdict,
    paired,
    side,
    value_verdict,
)
from .patch_evidence import SIZES, Cell, PatchRuns
from .patch_stages import BASE_IMAGES, MANY_IMAGES, WORTH

RIVALS = {
    "adamw_no_decay": "AdamW without decay on queries and keys", "muon": "Muon on queries and keys",
    "pogo": "POGO", "geoopt_adam": "geoopt's RiemannianAdam", "riemannian_sgd": "Riemannian SGD, its lr tuned too",
}  # fmt: skip
ABLATIONS = {
    "scale_free_canonical": "nothing measurable comes from the projector (embedded − canonical metric)",
    "scale_free_elementwise": "nothing measurable comes from equivariance (one scalar − element-wise)",
    "scale_free_uncapped": "(ours) nothing measurable comes from the trust region (capped − uncapped)",
}


class Claim(NamedTuple):
    """One row of the summary."""

    claim: str
    configuration: str
    figure: str
    verdict: str


def named(cell: Cell) -> str:
    return f"{cell.images:,} images, lr {cell.lr:g}, k {cell.k:g}"


def against(one: Cell, other: Cell) -> str:
    """The learning rates of both, once where they are equal."""
    apart = "" if one[2:] == other[2:] else f" against lr {other.lr:g}, k {other.k:g}"
    return f"{named(one)}{apart}"


def patch_claims(runs: PatchRuns) -> list[Claim]:
    """The paper's claims about images, each with our figure."""
    if not runs.cells:
        return []
    sized = [claim for images in (BASE_IMAGES, MANY_IMAGES) for claim in _at_a_size(runs, images)]
    return [*sized, *_float32(runs), *_growth(runs), *_customary(runs), *_rivals(runs)]


def _gain_claim(runs: PatchRuns, text: str, one: Cell, other: Cell, claimed: float) -> Claim:
    gain = runs.gain(one, other)
    t = f", t = {gain.t:.1f}, {gain.wins}/{gain.n} won" if gain.n > 1 else ""
    return Claim(text, against(one, other), interval(gain, " points") + t, gain_verdict(gain, claimed))


def _at_a_size(runs: PatchRuns, images: int) -> Iterator[Claim]:
    ours, theirs, frozen = (runs.tuned(images, arm) for arm in ("scale_free", "adamw", "frozen"))
    yield _gain_claim(runs, f"(rule of the screen) training queries and keys is worth {WORTH:g} points over freezing "
                      "them, both tuned", ours, frozen, WORTH)  # fmt: skip
    yield _gain_claim(
        runs, "+8.98 points over AdamW, 12 paired starts (t = 60.6, 12/12), both tuned", ours, theirs, 8.98
    )
    if theirs[2:] != ours[2:]:
        same = ours._replace(arm="adamw")
        yield _gain_claim(runs, "the same, AdamW at ours' learning rates", ours, same, 8.98)
    yield from _by_others(runs, images)
    start = runs.tuned(images, "adamw_default_init")
    if runs.differences(ours, start):
        yield _gain_claim(runs, "up to +6.79 points over AdamW from its usual start (earlier paper), both tuned",
                          ours, start, 6.79)  # fmt: skip


def _by_others(runs: PatchRuns, images: int) -> Iterator[Claim]:
    lr = runs.rest_lr()
    ours, theirs = (runs.chosen_by_others(images, arm, lr) for arm in ("scale_free", "adamw"))
    gain = paired([100 * (ours[seed] - theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())])
    if gain.n:
        yield Claim("the same, k of each the best of its other seeds", f"{images:,} images, lr {lr:g}",
                    interval(gain, " points"), gain_verdict(gain, 8.98))  # fmt: skip


def _float32(runs: PatchRuns) -> Iterator[Claim]:
    """What bfloat16 products change: the headline once more, and each of its arms against itself."""
    whole = runs.in_float32()
    if not whole.cells:
        return
    ours, theirs = (runs.tuned(BASE_IMAGES, arm) for arm in (OURS, BASELINE))
    yield _gain_claim(whole, "the same with float32 products, both as tuned with bfloat16", ours, theirs, 8.98)
    for cell in (ours, theirs):
        change = paired(differences({"float32": whole.cells.get(cell, {}), "bfloat16": runs.cells.get(cell, {})},
                                    "float32", "bfloat16"))  # fmt: skip
        yield Claim(f"(ours) nothing measurable comes from bfloat16 products (float32 − bfloat16, {cell.arm})",
                    named(cell), interval(change, " points"), equal_verdict(change))  # fmt: skip


def _growth(runs: PatchRuns) -> Iterator[Claim]:
    lr, k = runs.tuned(MANY_IMAGES, "scale_free")[2:]
    sizes = [n for n in SIZES if runs.differences(Cell(n, "scale_free", lr, k), Cell(n, "adamw", lr, k))]

    def same(images: int) -> tuple[Cell, Cell]:
        return Cell(images, "scale_free", lr, k), Cell(images, "adamw", lr, k)

    def tuned(images: int) -> tuple[Cell, Cell]:
        return runs.tuned(images, "scale_free"), runs.tuned(images, "adamw")

    for text, cells in (
        ("the gap widens with data, AdamW at ours' learning rates", same),
        ("the same, each as tuned", tuned),
    ):
        slope = paired(runs.slopes(cells, sizes))
        where = f"{', '.join(f'{n:,}' for n in sizes)} images, 8 epochs each"
        yield Claim(text, where, interval(slope, " points per doubling"), gain_verdict(slope, 0.0))


def _customary(runs: PatchRuns) -> Iterator[Claim]:
    """Where nothing is tuned: lr 1e-3 for AdamW and ours, 0.1 for SGD on frames."""
    ours, adamw, frozen = (Cell(BASE_IMAGES, arm, 1e-3, 1.0) for arm in ("scale_free", "adamw", "frozen"))
    sgd = Cell(BASE_IMAGES, "riemannian_sgd", 1e-3, 100.0)
    where = f"{BASE_IMAGES:,} images, untuned"
    moves, price, scale = runs.ratio(adamw, sgd, "movement"), runs.gain(sgd, frozen), runs.gain(ours, sgd)
    yield Claim(
        "a fixed Riemannian step moves 24–40× less than AdamW", where, ratio(moves), value_verdict(moves, 24, 40)
    )
    yield Claim("freezing the frames costs 0.28 points (against the fixed step)", where, interval(price, " points"),
                value_verdict(price, 0.28, 0.28, SAME))  # fmt: skip
    yield Claim("the whole gain comes from making the step scale free (ours − fixed step)", where,
                interval(scale, " points"), gain_verdict(scale, 0.0))  # fmt: skip
    yield _gain_claim(runs, "+8.98 points over AdamW, neither tuned", ours, adamw, 8.98)
    more, other = (cell._replace(k=10.0) for cell in (ours, adamw))
    yield _gain_claim(runs, "(ours) ten times the lr for queries and keys alone gains", more, ours, 0.0)
    yield _gain_claim(runs, "(ours) the same for AdamW", other, adamw, 0.0)


def _rivals(runs: PatchRuns) -> Iterator[Claim]:
    ours = runs.tuned(BASE_IMAGES, "scale_free")
    for arm, name in RIVALS.items():
        other = runs.tuned(BASE_IMAGES, arm)
        gain = runs.gain(ours, other)
        yield Claim(f"(ours) against {name}, both tuned", against(ours, other), interval(gain, " points"), side(gain))
    for arm, text in ABLATIONS.items():
        gain = runs.gain(ours, ours._replace(arm=arm))
        yield Claim(text, named(ours), interval(gain, " points"), equal_verdict(gain))


def grokking_claims(records: Sequence[Record]) -> list[Claim]:
    """The paper's claims about modular addition."""
    if not records:
        return []
    records = with_endpoints(records)
    main = main_configuration(records)
    return [*_grokking_at(records, main), *_other_decays(records, main)]


def _grokking_at(records: Sequence[Record], main: Config) -> list[Claim]:
    arms = by_arm(records, main)
    where = f"p = {main['p']}, width {main['width']}, {main['epochs']:,} epochs"
    end, late = (paired(differences(arms, OURS, BASELINE, metric)) for metric in ("endpoint", "held"))
    full = main["epochs"] >= 20_000  # a shorter run says nothing about the claimed epoch
    ours, theirs = (list(arms.get(arm, {}).values()) for arm in (OURS, BASELINE))
    fallen, spread = sum(r["collapses"] > 0 for r in ours), max((r["spread"] for r in ours), default=math.nan)
    if len(ours) < FEWEST:
        survive = NOT_TESTABLE
    else:
        survive = REPRODUCED if 2 * fallen >= len(ours) and spread < 1e-4 else NOT_REPRODUCED
    counts = [sum(r["collapses"] for r in runs) for runs in (ours, theirs)]
    fewer = paired([d / 100 for d in differences(arms, BASELINE, OURS, "collapses")])
    return [
        Claim("97.0 % against 61.1 % at epoch 20,000 (one run): +35.9 points", where,
              interval(end, " points at the end"), gain_verdict(end, 35.9) if full else NOT_TESTABLE),
        Claim("generalisation holds longer", where, interval(late, f" points of the late epochs above {HELD:.0%}"),
              gain_verdict(late, 0.0)),
        Claim("(stability) frames collapse less often", where,
              f"{counts[0]} collapses in {len(ours)} runs against AdamW's {counts[1]} in {len(theirs)}",
              gain_verdict(fewer, 0.0)),
        Claim("decay drives collapse cycles through the rest while the frames survive", where,
              f"{fallen} of {len(ours)} runs collapsed; singular values within {max(spread, 1e-5):.0e}", survive),
    ]  # fmt: skip


def _other_decays(records: Sequence[Record], main: Config) -> Iterator[Claim]:
    """Is there a decay at which frames hold what AdamW's queries and keys lose?"""
    found = {key(common(r["config"])): common(r["config"]) for r in records if r["config"]["epochs"] == main["epochs"]}
    for config in sorted(found.values(), key=lambda config: config["decay"]):
        late = paired(differences(by_arm(records, config), OURS, BASELINE, "held"))
        if config["decay"] != main["decay"] and late.n:
            where = f"p = {config['p']}, {config['fraction']:g} of the equations, {config['epochs']:,} epochs"
            yield Claim(f"(ours) generalisation holds longer at decay {config['decay']:g} of the rest", where,
                        interval(late, f" points of the late epochs above {HELD:.0%}"), side(late))  # fmt: skip


def finetune_claims(records: Sequence[Record]) -> list[Claim]:
    """Our own question, which the paper leaves open: what patching does to the fine-tuning of a pretrained ViT."""
    at_each = {f"lr {lr:g}": differences(arms, OURS, BASELINE) for lr, arms in by_peak(records).items()}
    at_each |= {f"lr {lr:g}, frames at {k:g} times that,": gains for (lr, k), gains in by_k(records).items()}
    return [
        Claim(f"(ours) fine-tuning the pretrained ViT-S at {where} gains", "DINOv2 ViT-S",
              interval(paired(gains), " points"), side(paired(gains)))
        for where, gains in at_each.items() if gains
    ]  # fmt: skip


def old_claims(records: Sequence[Record]) -> list[Claim]:
    """The configuration in which nothing depends on queries and keys: 16 pixels, 16 tokens."""
    if not records:
        return []
    arms = by_arm(records, main_configuration(records))
    worth, gain = (paired(differences(arms, OURS, other)) for other in ("frozen", BASELINE))
    return [
        Claim("(rule of the screen) training queries and keys is worth 5 points over freezing them", "16 px",
              interval(worth, " points"), gain_verdict(worth, WORTH)),
        Claim("+8.98 points over AdamW: there, no way of training them can win that", "16 px",
              interval(gain, " points"), UNDECIDED.split(":")[0] + ": nothing to win" if worth.high < WORTH
              else gain_verdict(gain, 8.98)),
    ]  # fmt: skip
