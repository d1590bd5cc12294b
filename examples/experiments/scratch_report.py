"""What the runs from scratch say: the table of arms and values of k, and the claims."""

from collections.abc import Mapping, Sequence

import numpy as np

from .claims import Claim
from .evidence import Arms, differences, interval
from .harness import Config, Record
from .paired_statistics import paired, side
from .report_sections import table
from .scratch import CORES, KS

FROM_FRAMES = "adamw_frames"


def named(arm: str, k: float) -> str:
    return f"{arm}, k = {k:g}"


def cells(records: Sequence[Record]) -> Arms:
    """{arm and k: {seed: record}}."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        config = record["config"]
        found.setdefault(named(config["arm"], config["k"]), {})[config["seed"]] = record
    return found


def words(config: Config) -> str:
    return f"{config['depth']} layers, {config['images']:,} images, {config['steps']} steps, lr {config['lr']:g}"


def scratch_claims(records: Sequence[Record]) -> list[Claim]:
    """At each k against AdamW from the same start; nothing is tuned."""
    found, claims = cells(records), []
    for arm, core in CORES.items():
        for k in KS if arm != FROM_FRAMES else ():
            other = named(FROM_FRAMES, k) if core == "identity" else named("adamw", 1.0)
            gain = paired(differences(found, named(arm, k), other))
            text = f'(ours) ViT-Ti from scratch, core="{core}", k = {k:g}, against {other}'
            if gain.n:
                claims.append(Claim(text, words(records[0]["config"]), interval(gain, " points"), side(gain)))
    return claims


def scratch_section(records: Sequence[Record]) -> str:
    """Test accuracy of every arm at every k."""

    def row(name: str, runs: Mapping[int, Record]) -> tuple[object, ...]:
        accuracies, losses = ([run[key] for run in runs.values()] for key in ("test_accuracy", "test_loss"))
        defects = [run["defect"] for run in runs.values() if run["defect"] is not None]
        return (
            name, len(runs), f"{100 * np.mean(accuracies):.2f}", f"{np.mean(losses):.3f}",
            f"{max(defects):.0e}" if defects else "–",
        )  # fmt: skip

    config = records[0]["config"]
    head = ("arm", "runs", "test accuracy, %", "test loss", "largest defect")
    text = (
        f"timm's vit_tiny at {config['side']} px in 4×4 patches, {words(config)} of the rest, batch {config['batch']}, "
        f"decay {config['decay']:g}; `adamw` and the cores learn and freeze start as timm does, `adamw_frames` and the "
        "core identity from orthonormal queries and keys; k is the lr of queries and keys over that of the rest."
    )
    return f"{text}\n\n{table(head, [row(name, runs) for name, runs in cells(records).items()])}"
