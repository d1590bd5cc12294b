"""Every message that the library raises is listed once, with its remedy, in the docs' troubleshooting page."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
FILES = sorted({path.resolve() for folder in ("stiefel_geo", "integrations") for path in (ROOT / folder).rglob("*.py")})
HEADING = "## Every message"


def template(node, constants):
    """The text of a message with … for every value in it; empty where it holds no text of its own."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left, constants) + template(node.right, constants)
    if isinstance(node, ast.Name):
        return constants.get(node.id, "…")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return template(node.func.value, constants).replace("{}", "…")
    return "…"


def is_message(node):
    """The argument that carries a message: of a raise, of warnings.warn, or of a list of load errors."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        return node.exc.args[0]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "errors.append"):
        return node.args[0]
    return None


def messages():
    """Place and template of every message in the library."""
    found = {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        assigned = [(node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign)]
        constants = {name.id: template(value, {}) for name, value in assigned if isinstance(name, ast.Name)}
        for node in ast.walk(tree):
            argument = is_message(node)
            if argument is None:
                continue
            text = template(argument, constants)
            if re.sub(r"[\W_]", "", text):
                found[f"{path.name}:{argument.lineno}"] = " ".join(text.split())
    return found


def rows():
    """First and second column of the page's table of messages."""
    table = PAGE.read_text().partition(HEADING)[2]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return [(cell[0].strip("`"), cell[1]) for cell in cells[2:]]


MESSAGES = messages()


@pytest.mark.parametrize("text", MESSAGES.values(), ids=MESSAGES)
def test_message_is_listed_once(text):
    listed = [row for row, _ in rows() if row in text]
    assert len(listed) == 1, f"{PAGE} lists it {len(listed)} times: {text}"


def test_every_row_is_a_message_and_has_a_remedy():
    assert len(rows()) > 30
    for row, remedy in rows():
        assert any(row in text for text in MESSAGES.values()), row
        assert len(remedy) > 10, row


@pytest.mark.parametrize("text", [m for m in MESSAGES.values() if m.startswith("rule:")])
def test_rule_messages_name_rule_found_and_remedy(text):
    assert re.match(r"rule: .+[;:,].*", text), text
    assert "found" in text or "not as" in text, text
