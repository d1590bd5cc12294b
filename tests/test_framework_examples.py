"""examples/train_{timm,lightning,accelerate}.py: copied with loaders.py alone, on the CPU where there is no CUDA."""

import ast
import importlib
import shutil
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from support.example_scripts import EXAMPLES, loaders
from support.image_folders import write_images

SCRIPTS = ("train_timm", "train_lightning", "train_accelerate")


def script(name):
    package = name.removeprefix("train_")
    pytest.importorskip(package, reason=f"{package} is an optional extra: pip install stiefel-geo[{package}]")
    return importlib.import_module(name)


def imported(name):
    """First names of all modules that a script imports."""
    nodes = list(ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parents = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {module.split(".")[0] for module in plain | parents}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_framework_example_needs_no_sibling_but_the_loaders(name):
    siblings = {path.stem for path in EXAMPLES.iterdir()}
    assert imported(name) & siblings == {"loaders"}
    assert not imported("loaders") & siblings


def test_two_copied_files_run_by_themselves(tmp_path):
    for name in ("train_accelerate.py", "loaders.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    script("train_accelerate")
    command = [sys.executable, "-W", "ignore", "train_accelerate.py", "--smoke"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "epoch 2: loss" in run.stdout


def test_train_timm_is_timms_recipe_in_under_150_lines():
    assert len((EXAMPLES / "train_timm.py").read_text().splitlines()) < 150


def test_train_timm_ends_two_epochs_on_the_manifold(tmp_path, capsys):
    assert script("train_timm").main(["--smoke", "--amp", "bfloat16", "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [float(line.rpartition(" ")[2]) < 1e-5 for line in lines] == [True, True]


# timm's reader leaves its files to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_train_timm_reads_folders_at_the_size_that_is_asked_for(tmp_path, capsys):
    for part in ("train", "validation"):
        write_images(tmp_path / "data" / part, ("cat", "dog"), 16)
    options = ["--data", str(tmp_path / "data"), "--model", "test_vit", "--img-size", "32"]
    assert script("train_timm").main([*options, "--smoke", "--out", str(tmp_path / "run")]) == 0
    assert "epoch 2: loss" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "said"), [
    (["--resume"], "--resume needs a checkpoint"),
    (["--data", "/no/folder"], "--data and --model go together"),
], ids=["no checkpoint", "no model"])  # fmt: skip
def test_train_timm_says_what_it_lacks(tmp_path, capsys, options, said):
    with pytest.raises(SystemExit, match="2"):
        script("train_timm").main([*options, "--out", str(tmp_path)])
    assert said in capsys.readouterr().err


def test_the_digits_are_shared_out_without_overlap():
    train, test = (loader.dataset.tensors[0].flatten(1) for loader in loaders.digits(32))
    assert (len(train), len(test)) == (1348, 449)
    assert (train.min(), train.max(), train.shape[1]) == (-1, 1, 3 * 32 * 32)
    assert len(torch.cat([train, test]).unique(dim=0)) == 1797


class Stop(Exception):
    """Ends a script once it has chosen its device."""


class Chosen:
    """Stands in for Lightning's Trainer and for accelerate's Accelerator."""

    options: ClassVar[dict[str, object]] = {}

    def __init__(self, **options):
        Chosen.options = options
        raise Stop


@pytest.mark.parametrize(("name", "class_", "expected"), [
    ("train_lightning", "Trainer", ("accelerator", "cpu")),
    ("train_accelerate", "Accelerator", ("cpu", True)),
])  # fmt: skip
def test_no_example_chooses_mps(name, class_, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    module = script(name)
    monkeypatch.setattr(module, class_, Chosen)
    with pytest.raises(Stop):
        module.main(["--smoke"])
    option, value = expected
    assert Chosen.options[option] == value


def test_train_timm_chooses_the_cpu_beside_mps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert script("train_timm").options([]).device == "cpu"
