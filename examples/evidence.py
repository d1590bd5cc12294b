"""From finished runs to figures: which records belong together, their paired differences, the claims and verdicts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from harness import Config, Record, key
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
from patch_stages import FIRST_GRID_SEED

OURS, BASELINE = "scale_free", "adamw"
OF_A_RUN = ("arm", "seed", "lr")  # what differs between the runs of one configuration
LATE = 0.5  # the share of the epochs that counts as late
HELD = 0.9  # validation accuracy that counts as generalised

Arms = Mapping[str, Mapping[int, Record]]


class Claim(NamedTuple):
    """One row of the summary."""

    claim: str
    configuration: str
    figure: str
    verdict: str


def common(config: Config) -> dict:
    return {name: value for name, value in config.items() if name not in OF_A_RUN}


def pairs_only(records: Sequence[Record]) -> list[Record]:
    """The records of the paired runs: those of the learning-rate grid have seeds of their own."""
    return [record for record in records if record["config"]["seed"] < FIRST_GRID_SEED]


def main_configuration(records: Sequence[Record]) -> dict:
    """The configuration that most arms were run in."""
    arms: dict[str, set[str]] = {}
    for record in pairs_only(records):
        arms.setdefault(key(common(record["config"])), set()).add(record["config"]["arm"])
    counts = Counter(key(common(record["config"])) for record in pairs_only(records))
    best = max(counts, key=lambda name: (len(arms[name]), counts[name]))
    return next(common(r["config"]) for r in records if key(common(r["config"])) == best)


def by_arm(records: Sequence[Record], configuration: Config) -> Arms:
    """{arm: {seed: record}} of the paired runs of one configuration."""
    result: dict[str, dict[int, Record]] = {}
    for record in pairs_only(records):
        if common(record["config"]) == dict(configuration):
            result.setdefault(record["config"]["arm"], {})[record["config"]["seed"]] = record
    return result


def differences(arms: Arms, one: str, other: str, metric: str = "test_accuracy") -> list[float]:
    """one − other in points, for every seed that both have, in the order of the seeds."""
    a, b = arms.get(one, {}), arms.get(other, {})
    return [100 * (a[seed][metric] - b[seed][metric]) for seed in sorted(a.keys() & b.keys())]


def movement_ratio(arms: Arms, one: str, other: str) -> Paired:
    """Geometric mean, with interval, of how many times farther `one` moves a frame per step and unit of lr."""
    a, b = arms.get(one, {}), arms.get(other, {})

    def pace(record: Record) -> float:
        return record["movement"] / record["config"]["lr"]

    logs = paired([math.log(pace(a[seed]) / pace(b[seed])) for seed in sorted(a.keys() & b.keys())])
    return logs._replace(mean=math.exp(logs.mean), low=math.exp(logs.low), high=math.exp(logs.high))


def sweep(records: Sequence[Record], main: Config) -> dict[tuple[float, int], list[float]]:
    """{(weight decay, images): differences} of ours and AdamW, everything else as in `main`."""
    cells: dict[tuple[float, int], list[float]] = {}
    for record in pairs_only(records):
        config = common(record["config"])
        if {**config, "decay": main["decay"], "images": main["images"]} == dict(main):
            cell = (config["decay"], config["images"])
            cells[cell] = differences(by_arm(records, config), OURS, BASELINE)
    return {cell: gains for cell, gains in sorted(cells.items()) if gains}


def slopes(records: Sequence[Record], main: Config) -> list[float]:
    """For each seed, by how many points the gain grows with every doubling of the images, at the main decay."""
    gains: dict[int, list[tuple[float, float]]] = {}
    for _, images in (cell for cell in sweep(records, main) if cell[0] == main["decay"]):
        arms = by_arm(records, {**main, "images": images})
        for seed in arms[OURS].keys() & arms[BASELINE].keys():
            gain = 100 * (arms[OURS][seed]["test_accuracy"] - arms[BASELINE][seed]["test_accuracy"])
            gains.setdefault(seed, []).append((math.log2(images), gain))
    most = max(map(len, gains.values()), default=0)
    return [
        float(np.polyfit(*zip(*points, strict=True), 1)[0])
        for _, points in sorted(gains.items())
        if len(points) == most > 1
    ]


def interval(value: Paired, unit: str = "", digits: int = 2) -> str:
    """mean [low, high] (n = …)."""
    if value.n < 2:
        return f"{value.mean:+.{digits}f}{unit} (n = {value.n}, no interval)" if value.n else "no runs"
    return f"{value.mean:+.{digits}f}{unit} [{value.low:+.{digits}f}, {value.high:+.{digits}f}] (n = {value.n})"


def ratio(value: Paired) -> str:
    return f"{value.mean:.1f}× [{value.low:.1f}, {value.high:.1f}] (n = {value.n})" if value.n > 1 else "no runs"


def described(config: Config) -> str:
    """The configuration in a few words."""
    return (
        f"{config['data']}, {config['side']} px in 4×4 patches, d = {config['width']}, {config['depth']} layers, "
        f"{config['heads']} heads; {config['images']:,} images, {config['steps']:,} steps of {config['batch']}, "
        f"decay {config['decay']:g}"
    )


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
    slope = paired(slopes(records, main))
    t = f", t = {main_gain.t:.1f}, {main_gain.wins}/{main_gain.n} won" if main_gain.n > 1 else ""
    data = f"{where}, " + ", ".join(f"{images:,}" for decay, images in sweep(records, main) if decay == main["decay"])
    return [
        Claim("+8.98 points over AdamW, 12 paired starts (t = 60.6, 12/12)", where,
              interval(main_gain, " points") + t, gain_verdict(main_gain, 8.98)),
        Claim("up to +6.79 points over AdamW (earlier paper), read as AdamW from its usual start", where,
              interval(start, " points"), gain_verdict(start, 6.79)),
        Claim("the gap widens with data", f"{data} images", interval(slope, " points per doubling"),
              gain_verdict(slope, 0.0)),
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


def held(record: Record) -> float:
    """Share of the late rows in which validation accuracy is above HELD."""
    late = [row for row in record["rows"] if row["epoch"] > LATE * record["reached"]]
    return sum(row["val_accuracy"] > HELD for row in late) / len(late)


def collapses(record: Record) -> int:
    """How often training accuracy fell below 0.9 after it had been above 0.99."""
    count, learned = 0, False
    for row in record["rows"]:
        if learned and row["train_accuracy"] < 0.9:
            count, learned = count + 1, False
        learned = learned or row["train_accuracy"] > 0.99
    return count


def with_endpoints(records: Sequence[Record]) -> list[Record]:
    """Grokking records with what the summary compares: endpoint, late share, collapses, the frames' worst spread."""
    return [
        {
            **record,
            "endpoint": record["rows"][-1]["val_accuracy"],
            "held": held(record),
            "collapses": collapses(record),
            "spread": max(row["largest"] - row["smallest"] for row in record["rows"]),
        }
        for record in records
    ]


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
