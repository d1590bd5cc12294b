"""Sessions that prove the supported range: `nox` runs them all, `nox -s oldest` one, `nox -l` lists them.

`oldest` installs the floors that pyproject.toml states (uv's lowest-direct resolution), so there is no second list of
them. `nox -s oldest -- record` writes the row of a session that passed into docs/versions.md; for
architectures of timm it is `nox -s coverage -- record`, ten minutes a version.
"""

import datetime
import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ("oldest", "between", "newest", "wheel", "without_links")

PYTHONS = ("3.11", "3.12", "3.13")
# Between the floors and the newest: torch → the other libraries as they were in its months, and one of the Pythons.
BETWEEN = {
    "2.8": ("3.12", "torch==2.8.*", "torchao==0.13.*", "peft==0.18.*", "timm==1.0.20", "transformers==5.24.*"),
    "2.11": ("3.13", "torch==2.11.*", "timm==1.0.26", "transformers==5.24.*"),
    "2.14": ("3.12", "torch==2.14.*", "timm==1.0.31"),
}
# What `coverage` installs: the floors, a timm between them, the newest.
COVERED = {
    "oldest": ("--resolution", "lowest-direct"),
    "middle": BETWEEN["2.11"][1:],
    "newest": ("--upgrade",),
}
# Deprecations in other versions of other libraries are not ours to answer; every other warning stays an error.
ALLOWED = (
    "default::DeprecationWarning",
    "default::FutureWarning",
    "default::SyntaxWarning",
    "default:Guards may run slower:RuntimeWarning",  # torch.compile on Python 3.13.0
    "default:The epoch parameter in:UserWarning",  # torch 2.6's own schedulers
    "default:The verbose parameter:UserWarning",  # timm 1.0.16's
)
CORE = ("-m", "core", *(word for allowed in ALLOWED for word in ("-W", allowed)))
SHOWN = ("torch", "timm", "geoopt", "transformers")
PAGE = Path("docs/versions.md")
FIRST_LINES = """
import sys, timm, torch, stiefel_geo
assert "site-packages" in stiefel_geo.__file__, stiefel_geo.__file__
model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32)
print(stiefel_geo.patch(model))
optimizer = stiefel_geo.ScaleFreeRiemannianAdam(model.parameters(), lr=1e-3, weight_decay=0.05)
torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([3, 7])).backward()
optimizer.step()
stiefel_geo.unpatch(model)
print(sys.version.split()[0], torch.__version__, timm.__version__, stiefel_geo.__version__)
"""


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """The floors of pyproject.toml."""
    session.install("--resolution", "lowest-direct", "-e", ".[test]")
    _core(session)


@nox.session
@nox.parametrize("python,torch", [nox.param(BETWEEN[torch][0], torch, id=f"torch-{torch}") for torch in BETWEEN])
def between(session: nox.Session, torch: str) -> None:
    """Versions between the floors and the newest."""
    session.install("-e", ".[test]", *BETWEEN[torch][1:])
    _core(session)


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """The newest releases, on every Python."""
    session.install("--upgrade", "-e", ".[test]")
    _core(session)


@nox.session(python=PYTHONS[-1])
def prerelease(session: nox.Session) -> None:
    """The newest releases and pre-releases of everything: what will break next."""
    session.install("--upgrade", "--prerelease", "allow", "-e", ".[test]")
    _core(session)


@nox.session(python=PYTHONS[0])
@nox.parametrize("timm", [nox.param(which, id=which) for which in COVERED])
def coverage(session: nox.Session, timm: str) -> None:
    """Every architecture of a timm, patched on the meta device."""
    session.install("-e", ".[examples]", *COVERED[timm])  # with a scipy that geoopt 0.5.0 knows
    result = Path(session.create_tmp()).resolve() / "coverage.json"
    result.unlink(missing_ok=True)  # 1 is also what a crash exits with
    session.run("python", "-m", "stiefel_geo.integrations.coverage", "--json", str(result), success_codes=[0, 1])
    if "record" in session.posargs:
        counts = Counter(model["status"] for model in json.loads(result.read_text()))
        _record("coverage by version", [*_versions(session, "timm", "torch"), *_shown(counts)])


@nox.session(python=PYTHONS[0])
@nox.parametrize("versions", [nox.param(which, id=which) for which in ("oldest", "newest")])
def wheel(session: nox.Session, versions: str) -> None:
    """Build sdist and wheel, check them, and use the wheel in a clean environment, away from the checkout."""
    built, root = Path(session.create_tmp()).resolve() / versions, Path.cwd()
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", str(built))  # the wheel is built from the sdist
    session.run("twine", "check", "--strict", *map(str, built.glob("stiefel_geo-*")))
    (package,) = built.glob("*.whl")
    session.install(f"stiefel-geo[examples] @ {package.as_uri()}", *(_floors() if versions == "oldest" else ()))
    session.chdir(built)
    session.run("python", "-c", FIRST_LINES)
    session.run("python", "-W", "ignore", "-m", "stiefel_geo.certificates")
    session.run("python", str(root / "examples/finetune.py"), "--smoke", "--out", "run")


@nox.session(python=PYTHONS[0])
def without_links(session: nox.Session) -> None:
    """A checkout on a file system without symbolic links."""
    clone = Path(session.create_tmp()).resolve() / "clone"
    session.run("rm", "-rf", str(clone), external=True)
    session.run("git", "-c", "core.symlinks=false", "clone", "--quiet", ".", str(clone), external=True)
    session.chdir(clone)
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "-q", "-n", "2", *CORE, env={"OMP_NUM_THREADS": "1"})


def _core(session: nox.Session) -> None:
    """The core suite in this session's environment; its row goes into docs/versions.md if asked for."""
    result = Path(session.create_tmp()).resolve() / f"{session.name}.xml"
    session.run("python", "-m", "pytest", "-q", "-n", "2", *CORE, f"--junitxml={result}", env={"OMP_NUM_THREADS": "1"})
    if "record" in session.posargs:
        counts = ElementTree.parse(result).getroot()[0].attrib
        passed = int(counts["tests"]) - int(counts["skipped"])
        outcome = f"{passed} passed, {counts['skipped']} skipped"
        _record("sessions", [session.name, str(session.python), *_versions(session, *SHOWN), outcome])


def _floors() -> list[str]:
    """What pyproject.toml states, pinned: uv's lowest-direct sees a wheel's requirements as indirect ones."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line.replace(">=", "==") for line in project["dependencies"] + project["optional-dependencies"]["examples"]]


def _versions(session: nox.Session, *packages: str) -> list[str]:
    code = f"import importlib.metadata as m, json; print(json.dumps([m.version(name) for name in {packages}]))"
    found: list[str] = json.loads(str(session.run("python", "-c", code, silent=True)))
    return found


def _shown(counts: Counter[str]) -> list[str]:
    return [str(counts[status]) for status in ("wholly", "in part", "not at all", "not built", "without attention")]


def _record(table: str, cells: list[str]) -> None:
    """Put a row, with today's date, in the place of the one with the same first cell."""
    page = PAGE.read_text(encoding="utf-8")
    before, rows, after = re.split(rf"(?<=<!-- {table} -->\n)|(?=<!-- /{table} -->)", page)
    others = [line for line in rows.splitlines(keepends=True) if not line.startswith(f"| {cells[0]} |")]
    row = f"| {' | '.join(cells)} | {datetime.date.today()} |\n"
    PAGE.write_text(before + "".join([*others, row]) + after, encoding="utf-8")
