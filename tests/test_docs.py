"""Every code block of the pages under integrations/docs runs, in order, in one namespace per page; README too."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import example_scripts  # noqa: F401  # puts examples/ on the path
import pytest
import timm
import torch

import stiefel_geo
from stiefel_geo.integrations.fsdp_memory import GIB, estimate

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "integrations" / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {"frameworks": ("lightning", "accelerate", "transformers")}


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
    width = {"img_size": 224, "patch_size": 14, "embed_dim": 4096, "depth": 33, "num_heads": 32, "num_classes": 0}
    with torch.device("meta"):
        pairs = {
            "ViT-g/14, 1.01 B": tuple(timm.create_model("vit_giant_patch14_224") for _ in range(2)),
            "6.65 B": tuple(timm.models.VisionTransformer(**width) for _ in range(2)),
        }
    for _, patched in pairs.values():
        stiefel_geo.patch(patched)
    return pairs


def test_the_memory_table_is_what_the_estimate_gives():
    page = (ROOT / "integrations" / "docs" / "distributed.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "GiB |" in line]
    found, expected = [row[-5:] for row in rows], []
    for plain, patched in giants().values():
        for ranks in (8, 16, 32, 64):
            ours, half = estimate(patched, ranks), estimate(patched, ranks, gathered_bytes=2)
            held = [f"{each.held / GIB:.2f} GiB" for each in (estimate(plain, ranks), ours)]
            expected.append([str(ranks), *held, f"{ours.sent / GIB:.1f} GiB", f"{half.sent / GIB:.1f} GiB"])
    assert found == expected


def test_every_block_is_python_or_a_command():
    assert {language for page in PAGES for language, _, _ in blocks(page)} == {"python", "sh"}


def test_the_pages_name_what_the_package_exports():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unnamed = {name for name in stiefel_geo.__all__ if name not in text}
    assert unnamed <= {"PatchReport", "PolarStiefel", "Certificate", "certify", "frames"}
