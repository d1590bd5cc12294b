"""The shape of the house: public names, and imports that go one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stiefel_geo

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "Certificate",
    "PatchReport",
    "PolarStiefel",
    "ScaleFreeRiemannianAdam",
    "certify",
    "frames",
    "param_groups",
    "patch",
    "plain_state_dict",
    "unpatch",
}
# Lower floors may not import from higher ones.
FLOORS = [
    {"stiefel", "precision", "sharding", "layouts", "report", "assembled"},
    {"retraction", "manifold"},
    {"step", "frames"},
    {"batching", "riemannian", "projections", "plain_keys"},
    {"checks", "carrying"},
    {"loading", "rewriting"},
    {"optim", "patching"},
    {"groups", "averaging", "certificates", "diagnostics"},
]


def imported_siblings(path: Path) -> set[str]:
    """Modules of the package that a file imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found


def test_public_names_are_the_contract() -> None:
    assert set(stiefel_geo.__all__) >= PUBLIC - {"Certificate"}
    assert all(hasattr(stiefel_geo, name) for name in stiefel_geo.__all__)


@pytest.mark.parametrize("module", sorted(set().union(*FLOORS[:-1])))
def test_imports_go_one_way(module: str) -> None:
    floor = next(i for i, names in enumerate(FLOORS) if module in names)
    above = set().union(*FLOORS[floor + 1 :]) | {"integrations"}
    assert not imported_siblings(ROOT / "stiefel_geo" / f"{module}.py") & above


def test_importing_the_package_does_not_import_timm() -> None:
    code = "import sys, stiefel_geo; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_integrations_are_imported_under_the_package_only() -> None:
    code = "import integrations"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "import this package as stiefel_geo.integrations" in run.stderr


def test_every_module_has_its_floor() -> None:
    modules = {path.stem for path in (ROOT / "stiefel_geo").iterdir() if path.suffix == ".py"} - {"__init__"}
    assert modules | {"certificates"} == set().union(*FLOORS)


@pytest.mark.parametrize("module", ["step", "batching", "riemannian", "checks", "loading", "optim"])
def test_the_optimizer_does_not_know_the_patch(module: str) -> None:
    patch_side = {"layouts", "frames", "projections", "carrying", "rewriting", "patching", "report", "groups"}
    assert not imported_siblings(ROOT / "stiefel_geo" / f"{module}.py") & patch_side
