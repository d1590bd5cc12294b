"""REPORT.md for people and report.json for programs, from what the stages found so far."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from .rows import Row, Settings
from .stages import Result

VERDICTS = {True: "holds", False: "**fails**", None: "–"}


def write_report(results: Mapping[str, Result], settings: Settings) -> None:
    write(settings.out / "report.json", as_json(results, settings))
    write(settings.out / "REPORT.md", as_markdown(results, settings))


def write(path: Path, text: str) -> None:
    """In one rename, so that a stopped run leaves the report of the stage before."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def as_json(results: Mapping[str, Result], settings: Settings) -> str:
    rows = {name: [asdict(row) for row in result.rows] for name, result in results.items()}
    stages = {name: {"seconds": round(result.seconds, 1), "rows": rows[name]} for name, result in results.items()}
    holds = all(row["holds"] is not False for found in rows.values() for row in found)
    run = {"device": settings.device, "smoke": settings.smoke, "holds": holds, "stages": stages}
    return json.dumps(run, indent=1) + "\n"


def as_markdown(results: Mapping[str, Result], settings: Settings) -> str:
    rows = [row for result in results.values() for row in result.rows]
    counts = [sum(row.holds is value for row in rows) for value in (True, False)]
    kind = f"`--device {settings.device}`" + (", `--smoke`: tiny sizes, figures mean nothing" if settings.smoke else "")
    head = f"# Validation of stiefel_geo\n\n{kind}. {counts[0]} bounds hold, {counts[1]} fail.\n"
    return "\n".join([head, *(section(name, result) for name, result in results.items())])


def section(name: str, result: Result) -> str:
    lines = [f"## {name} ({result.seconds:.0f} s)", "", "| check | measured | bound | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(line(row) for row in result.rows), ""])


def line(row: Row) -> str:
    cells = (row.check, row.measured, row.bound, VERDICTS[row.holds])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
