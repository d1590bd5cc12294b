"""Records of modular addition, fine-tuning and the 16-pixel runs: which belong together, and their differences."""

from collections import Counter
from collections.abc import Mapping, Sequence

from .harness import Config, Record, key
from .paired_statistics import Paired
from .patch_training import FIRST_GRID_SEED

OURS, BASELINE = "scale_free", "adamw"
OF_A_RUN = ("arm", "seed", "lr")  # what differs between the runs of one configuration
LATE = 0.5  # the share of the epochs that counts as late
HELD = 0.9  # validation accuracy that counts as generalised

Arms = Mapping[str, Mapping[int, Record]]

NO_RUNS = "no runs"  # in the place of a figure


def common(config: Config) -> Config:
    return {name: value for name, value in config.items() if name not in OF_A_RUN}


def pairs_only(records: Sequence[Record]) -> list[Record]:
    """The records of the paired runs: those of the learning-rate grid have seeds of their own."""
    return [record for record in records if record["config"]["seed"] < FIRST_GRID_SEED]


def main_configuration(records: Sequence[Record]) -> Config:
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


def sweep(records: Sequence[Record], main: Config) -> dict[tuple[float, int], list[float]]:
    """{(weight decay, images): differences} of ours and AdamW, everything else as in `main`."""
    cells: dict[tuple[float, int], list[float]] = {}
    for record in pairs_only(records):
        config = common(record["config"])
        if {**config, "decay": main["decay"], "images": main["images"]} == dict(main):
            cell = (config["decay"], config["images"])
            cells[cell] = differences(by_arm(records, config), OURS, BASELINE)
    return {cell: gains for cell, gains in sorted(cells.items()) if gains}


def interval(value: Paired, unit: str = "", digits: int = 2) -> str:
    """mean [low, high] (n = …)."""
    if value.n < 2:
        return f"{value.mean:+.{digits}f}{unit} (n = {value.n}, no interval)" if value.n else NO_RUNS
    return f"{value.mean:+.{digits}f}{unit} [{value.low:+.{digits}f}, {value.high:+.{digits}f}] (n = {value.n})"


def ratio(value: Paired) -> str:
    return f"{value.mean:.1f}× [{value.low:.1f}, {value.high:.1f}] (n = {value.n})" if value.n > 1 else NO_RUNS


def described(config: Config) -> str:
    """The configuration in a few words."""
    return (
        f"{config['data']}, {config['side']} px in 4×4 patches, d = {config['width']}, {config['depth']} layers, "
        f"{config['heads']} heads; {config['images']:,} images, {config['steps']:,} steps of {config['batch']}, "
        f"decay {config['decay']:g}"
    )


def held(record: Record) -> float:
    """Share of the late rows in which validation accuracy is above HELD."""
    late = [row for row in record["rows"] if row["epoch"] > LATE * record["reached"]]
    return sum(bool(row["val_accuracy"] > HELD) for row in late) / len(late)


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


def by_peak(records: Sequence[Record]) -> dict[float, Arms]:
    """{peak learning rate: arms} of the fine-tuning runs of the configuration with most of them."""
    counts = Counter(key(_but_peak(record)) for record in records)
    main = max(counts, key=counts.__getitem__, default="")
    most = [record for record in records if key(_but_peak(record)) == main]
    peaks = sorted({record["config"]["peak_lr"] for record in most})
    return {lr: by_arm(most, next(common(r["config"]) for r in most if r["config"]["peak_lr"] == lr)) for lr in peaks}


def by_k(records: Sequence[Record]) -> dict[tuple[float, float], list[float]]:
    """{(peak learning rate, k): ours with frames at k times it − AdamW, in points}, k other than 1."""
    found: dict[tuple[float, float], list[float]] = {}
    for lr, arms in by_peak(records).items():
        if BASELINE in arms:
            config = common(next(iter(arms[BASELINE].values()))["config"])
            ks = {r["config"].get("k", 1.0) for r in records if {**r["config"], **config} == r["config"]} - {1.0}
            for k in sorted(ks):
                raised = by_arm(records, {**config, "k": k}).get(OURS, {})
                found[lr, k] = differences({OURS: raised, BASELINE: arms[BASELINE]}, OURS, BASELINE)
    return found


def _but_peak(record: Record) -> Config:
    return {name: value for name, value in common(record["config"]).items() if name != "peak_lr"}
