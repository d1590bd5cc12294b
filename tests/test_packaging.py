"""What a user installs: the files of wheel and sdist, the metadata, and one place for every version."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

import stiefel_geo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGED = sorted(
    [
        *(f"stiefel_geo/{path.relative_to(ROOT / 'stiefel_geo')}" for path in (ROOT / "stiefel_geo").rglob("*.py")),
        *(f"stiefel_geo/integrations/{path.name}" for path in (ROOT / "integrations").glob("*.py")),
    ]
)
MODULES = sorted({*PACKAGED, "stiefel_geo/py.typed"})


def tracked_copy(target: Path) -> Path:
    """The checkout as git leaves it where there are no symbolic links: a link is a file that holds its target."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        source, copy = ROOT / name, target / name
        if not name.startswith(("examples/", "docs/")) and (source.is_symlink() or source.exists()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(os.readlink(source).encode() if source.is_symlink() else source.read_bytes())
    return target


def build(kind: str, tree: Path) -> Path:
    """The distribution that pyproject.toml's build backend makes of a tree."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return tree / "dist" / run.stdout.split()[-1]


@cache
def distributions(folder: str) -> tuple[Path, Path, Path]:
    """The sdist of a checkout without links, the wheel made from it, and the wheel of the checkout itself."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tracked_copy(Path(folder) / "tree")
    sdist = build("sdist", tree)
    with tarfile.open(sdist) as archive:
        archive.extractall(Path(folder) / "unpacked", filter="data")
    (unpacked,) = (Path(folder) / "unpacked").iterdir()
    return sdist, build("wheel", unpacked), build("wheel", tree)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return distributions(str(tmp_path_factory.mktemp("built")))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_wheel_holds_the_package_and_nothing_else(built):
    assert sorted(name for name in contents(built[1]) if ".dist-info/" not in name) == MODULES


def test_sdist_without_links_builds_the_wheel_of_the_checkout(built):
    assert contents(built[1]) == contents(built[2])


def test_sdist_holds_no_links_and_neither_tests_nor_examples(built):
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    rooms = {member.name.split("/")[1] for member in members if member.isdir() and "/" in member.name}
    assert rooms == {"stiefel_geo", "integrations", "stiefel_geo.egg-info"}


def test_metadata_names_the_floors_the_license_and_the_version(built):
    (metadata,) = (text for name, text in contents(built[1]).items() if name.endswith("METADATA"))
    lines = metadata.decode().splitlines()
    assert {line.removeprefix("Requires-Dist: ") for line in lines} >= set(PROJECT["dependencies"])
    assert {"License-Expression: MIT", "Classifier: Typing :: Typed", f"Version: {stiefel_geo.__version__}"} <= set(
        lines
    )


def test_changelog_and_citation_name_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert released[0] == stiefel_geo.__version__
    assert f"\nversion: {stiefel_geo.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def floors() -> dict[str, str]:
    """Library → its floor in pyproject.toml, Python's with them."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = {m[1]: m[2] for words in lists for word in words if (m := re.match(r"([\w-]+)(?:\[.*])?>=([\d.]+)$", word))}
    return found | {"Python": PROJECT["requires-python"].removeprefix(">=")}


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading of docs/versions.md."""
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert rows, heading
    return [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in rows[0].splitlines()][2:]


def test_the_page_of_versions_names_the_floors():
    stated = {row[0]: row[1] for row in table("What is supported")}
    assert stated == {name: floors()[name] for name in stated}
    assert {"Python", "torch", "timm", "geoopt", "transformers"} <= set(stated)


def noxfile() -> dict[str, object]:
    """The constants of noxfile.py, read without nox."""
    body = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body
    named = {node.targets[0].id: node.value for node in body if isinstance(node, ast.Assign) and len(node.targets) == 1
             and isinstance(node.targets[0], ast.Name)}  # fmt: skip
    return {name: ast.literal_eval(named[name]) for name in ("PYTHONS", "BETWEEN")}


def test_every_python_of_the_sessions_has_its_classifier():
    stated = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert tuple(stated) == noxfile()["PYTHONS"]
    assert stated[0] == floors()["Python"]


def imported(path: Path) -> set[tuple[str, bool]]:
    """Packages outside the standard library that a file imports, and whether on import of the file itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found |= {(name.split(".")[0], not getattr(node, "col_offset", 0)) for name in names}
    return {(name, at_once) for name, at_once in found if name not in {*sys.stdlib_module_names, "stiefel_geo", ""}}


def test_every_import_of_the_package_is_a_declared_dependency():
    needed = {re.split(r"[\[>=]", word)[0] for word in PROJECT["dependencies"]}
    core = [path for path in (ROOT / "stiefel_geo").rglob("*.py") if "integrations" not in path.parts]
    assert {name for path in core for name, at_once in imported(path) if at_once} == needed - {"timm"}
    optional = [*core, *(ROOT / "integrations").glob("*.py")]
    assert {name for path in optional for name, _ in imported(path)} <= needed | set(floors())
