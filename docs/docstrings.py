"""For the API page: a docstring's aligned names and meanings, or its Args and Raises, as a list in Markdown."""

import re
from typing import Any

import griffe

ALIGNED = re.compile(r"^(\S+(?: \S+)*) {2,}(\S.*)$")  # name  meaning, with the continuation indented
SECTION = re.compile(r"^(Args|Raises):$")
ENTRY = re.compile(r"^ {4}(\w+): (.*)$")


def entries(lines: list[str], pattern: re.Pattern[str]) -> list[str]:
    """One item per line that matches; the others go on with the item before them."""
    items: list[str] = []
    for line in lines:
        if found := pattern.match(line):
            items.append(f"- `{found[1]}`: {found[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return items


def paragraph(text: str) -> str:
    """Markdown of one paragraph of a docstring."""
    first, *rest = lines = text.split("\n")
    if ALIGNED.match(first) and all(line.startswith(" ") or ALIGNED.match(line) for line in rest):
        return "\n".join(entries(lines, ALIGNED))
    if SECTION.match(first) and rest and ENTRY.match(rest[0]):
        return "\n".join([f"**{first[:-1]}**\n", *entries(rest, ENTRY)])
    return re.sub(r"::$", ":", text)


class Meanings(griffe.Extension):
    """Rewrites every docstring before mkdocstrings shows it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(paragraph(text) for text in obj.docstring.value.split("\n\n"))
