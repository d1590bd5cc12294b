"""Every code block of the pages under docs runs, in order, in one namespace per page; README too."""

import copy
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support import example_scripts  # noqa: F401  # puts examples/ on the path
from timm.models.vision_transformer import VisionTransformer

import stiefel_geo
from stiefel_geo.integrations.fsdp_memory import GIB, estimate

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {"frameworks": ("lightning", "accelerate", "transformers"), "transformers": ("transformers",)}


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """Language, code and first line of every fenced block."""
    text = page.read_text(encoding="utf-8")
    return [(m[1], m[2], text[: m.start(2)].count("\n")) for m in BLOCK.finditer(text)]


def run_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for language, code, line in blocks(page):
        if language == "python":
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # inside Lightning and its like
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package, reason=f"{package} is an optional extra: pip install stiefel-geo[{package}]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_python(page, tmp_path, monkeypatch)


SHELL = [(page.stem, code.strip()) for page in PAGES for language, code, _ in blocks(page) if language == "sh"]


@pytest.mark.parametrize(("page", "command"), SHELL, ids=lambda value: value)
def test_the_commands_of_a_page_run(page, command, tmp_path, monkeypatch):
    program, script, *arguments = shlex.split(command)
    assert program == "python"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def giants() -> dict[str, tuple[torch.nn.Module, torch.nn.Module]]:
    """The two models of the memory table, plain and patched, on the meta device."""
    width: dict[str, Any] = {
        "img_size": 224,
        "patch_size": 14,
        "embed_dim": 4096,
        "depth": 33,
        "num_heads": 32,
        "num_classes": 0,
    }
    with torch.device("meta"):
        plain = {
            "ViT-g/14, 1.01 B": timm.create_model("vit_giant_patch14_224"),
            "6.65 B": VisionTransformer(**width),
        }
        pairs = {name: (model, copy.deepcopy(model)) for name, model in plain.items()}
    for _, patched in pairs.values():
        stiefel_geo.patch(patched)
    return pairs


def test_the_memory_table_is_what_the_estimate_gives():
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "GiB |" in line]
    found, expected = [row[-5:] for row in rows], []
    for plain, patched in giants().values():
        for ranks in (8, 16, 32, 64):
            ours, half = estimate(patched, ranks), estimate(patched, ranks, gathered_bytes=2)
            held = [f"{each.held / GIB:.2f} GiB" for each in (estimate(plain, ranks), ours)]
            expected.append([str(ranks), *held, f"{ours.sent / GIB:.1f} GiB", f"{half.sent / GIB:.1f} GiB"])
    assert found == expected


def test_the_memory_of_no_rank_is_refused():
    with pytest.raises(ValueError, match="ranks must be 1 or more; got 0"):
        estimate(torch.nn.Linear(2, 2), ranks=0)


def test_every_block_runs_or_is_marked_as_text():
    """`text` and `console` are for commands that need a GPU, a download or an installation."""
    assert {language for page in PAGES for language, _, _ in blocks(page)} <= {"python", "sh", "text", "console"}


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is an extra: pip install -e .[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "api" / "index.html").stat().st_size > 10_000


def test_every_public_name_is_on_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in stiefel_geo.__all__ if f"::: stiefel_geo.{name}\n" not in page] == []


def test_readme_is_short_and_its_first_screen_says_what_to_expect():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 95
    assert lines.index("## What to expect") < 30


PATH = re.compile(r"`(?:python )?((?:docs|examples|integrations|stiefel_geo|tests|\.ci)/[\w./*]*)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page):
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not any(ROOT.glob(path))] == []


def test_every_figure_of_readmes_table_stands_on_the_page_that_its_row_names():
    table = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- expect -->")[2].partition("<!-- /expect")[0]
    )
    figures = 0
    for row in (row for row in table.splitlines() if "docs/" in row):
        pages = "".join((ROOT / path).read_text(encoding="utf-8") for path in re.findall(r"docs/\w+\.md", row))
        found = re.findall(r"\d+(?:[.,]\d+)+", row)
        figures += len(found)
        assert [figure for figure in found if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", pages)] == []
    assert figures > 10


def test_the_certificates_page_has_the_claims_that_the_command_prints():
    page = (ROOT / "docs" / "certificates.md").read_text(encoding="utf-8")
    printed = [line.split(" | ")[1] for line in page.splitlines() if re.match(r"\| \d \|", line)]
    assert printed == list(dict.fromkeys(certificate.claim for certificate in stiefel_geo.certify([(16, 4)])))
