"""The shape of the house: public names, and imports that go one way."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import stiefel_geo

ROOT = Path(__file__).parents[1]
# Rooms from the ground up: imports go to the same room or a lower one.
FLOORS = (
    {"stiefel", "precision", "sharding"},
    {"retraction", "manifold"},
    {"optim", "attention"},  # the two wings, which do not know each other
    {"layers", "averaging", "diagnostics", "groups", "certificates"},
    {"integrations"},
)
PUBLIC = {
    "Layout",
    "PatchReport",
    "PolarStiefel",
    "ScaleFreeRiemannianAdam",
    "certify",
    "frames",
    "param_groups",
    "patch",
    "plain_state_dict",
    "project_frames_",
    "register_attention",
    "scale_lr_",
    "unpatch",
    "unpatched",
}


def sources() -> dict[str, Path]:
    """Module below stiefel_geo → its file; the door itself is left out, since it opens on everything."""
    core = (path for path in (ROOT / "stiefel_geo").rglob("*.py") if "integrations" not in path.parts)
    found = {path.relative_to(ROOT / "stiefel_geo"): path for path in core}
    found |= {Path("integrations") / path.name: path for path in (ROOT / "integrations").glob("*.py")}
    names = {".".join(short.with_suffix("").parts).removesuffix(".__init__"): path for short, path in found.items()}
    return {name: path for name, path in names.items() if name != "__init__"}


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """Modules below stiefel_geo that a file imports anywhere, functions and type checks included."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("stiefel_geo.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *(node.module or "").removeprefix("stiefel_geo").strip(".").split(".")]).strip(".")
            if not node.level and not (node.module or "").startswith("stiefel_geo"):
                continue
            below = [f"{stem}.{alias.name}".strip(".") for alias in node.names]
            found |= {name if name in known else stem for name in below}
    return {module for module in found if module in known} - {name}


def graph() -> dict[str, set[str]]:
    modules = sources()
    return {name: imports_of(name, path, set(modules)) for name, path in modules.items()}


def room(name: str) -> str:
    return name.split(".")[0]


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room(name) in rooms)


def test_public_names_are_the_contract() -> None:
    assert set(stiefel_geo.__all__) == PUBLIC | {"Certificate"}
    assert all(hasattr(stiefel_geo, name) for name in stiefel_geo.__all__)


def test_every_room_has_its_floor() -> None:
    assert {room(name) for name in sources()} == set().union(*FLOORS)


def test_imports_go_one_way() -> None:
    upwards = {(name, other) for name, others in graph().items() for other in others if floor(other) > floor(name)}
    assert not upwards


def test_no_module_imports_itself_by_a_detour() -> None:
    assert len(list(TopologicalSorter(graph()).static_order())) == len(sources())


@pytest.mark.parametrize(("wing", "other"), [("optim", "attention"), ("attention", "optim")])
def test_the_wings_do_not_know_each_other(wing: str, other: str) -> None:
    edges = {(room(name), room(used)) for name, others in graph().items() for used in others}
    assert (wing, other) not in edges


def test_the_graph_is_read_from_the_files() -> None:
    edges = graph()
    assert "stiefel" in edges["retraction"]
    assert "attention.layouts" in edges["integrations.timm_attention"]
    assert "retraction" in edges["optim.step"]


def test_nothing_is_imported_by_string() -> None:
    by_string = [name for name, path in sources().items() if "import_module" in path.read_text(encoding="utf-8")]
    assert by_string == []


def test_no_module_shares_a_name_with_a_public_function() -> None:
    assert not {name.rpartition(".")[2] for name in sources()} & set(stiefel_geo.__all__)


def test_importing_the_package_does_not_import_timm() -> None:
    code = "import sys, stiefel_geo; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_integrations_are_imported_under_the_package_only() -> None:
    code = "import integrations"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "import this package as stiefel_geo.integrations" in run.stderr
