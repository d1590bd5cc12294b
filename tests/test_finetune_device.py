"""examples/finetune.py towards a GPU: where it computes, and how batches get there. No GPU is needed."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.example_scripts import batches, finetune, process_group
from support.tiny_vit import tiny_vit
from torch.nn.parallel import DistributedDataParallel

import stiefel_geo

META = torch.device("meta")


def test_both_starts_are_computed_on_the_device_of_the_arm(monkeypatch):
    places: list[torch.device] = []

    def gap(*outputs):
        places.extend(output.device for output in outputs)
        return 0.0

    monkeypatch.setattr(finetune, "largest_gap", gap)
    start, patched = tiny_vit(depth=1, patched=False), tiny_vit(depth=1)
    test = [(torch.zeros(3, 16, 16), 0)] * 4
    finetune.report_start(start, SimpleNamespace(model=patched.to(META), device=META), test)
    assert places == [META, META]
    assert next(start.parameters()).device.type == "cpu"


def test_on_cuda_processes_load_ahead_into_pinned_memory(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert batches.loading("cuda", None) == {"num_workers": 8, "pin_memory": True}
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert batches.loading("cuda", None) == {"num_workers": 4, "pin_memory": True}


@pytest.mark.parametrize(("device", "workers"), [("cuda", 0), ("cpu", 3)])
def test_a_given_number_of_processes_is_obeyed(device, workers):
    assert batches.loading(device, workers)["num_workers"] == workers


def test_on_a_cpu_the_main_process_loads():
    assert batches.loading("cpu", None) == {"num_workers": 0, "pin_memory": False}


class Part:
    """Half of a batch that notes how it is moved."""

    def __init__(self):
        self.moves = []

    def to(self, device, non_blocking=False):
        self.moves.append((device, non_blocking))
        return self


def test_copies_to_the_device_do_not_block():
    images, labels = Part(), Part()
    assert batches.moved((images, labels), META) == (images, labels)
    assert images.moves == labels.moves == [(META, True)]


def test_a_machine_with_mps_alone_trains_on_its_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert finetune.options([]).device == "cpu"


def test_the_line_on_the_start_gives_how_far_the_logits_are_apart(capsys):
    start, patched = tiny_vit(depth=1, patched=False), tiny_vit(depth=1, patched=False)
    stiefel_geo.patch(patched)
    test = [(torch.randn(3, 16, 16), 0)] * 4
    finetune.report_start(start, SimpleNamespace(model=patched, device=torch.device("cpu")), test)
    assert float(capsys.readouterr().out.split()[-1]) < 1e-5


def gloo_threads() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end between its listing and its reading
            if "gloo" in (task / "comm").read_text():
                found.add(task.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="it counts threads in /proc, which only Linux has")
def test_no_thread_outlives_the_process_group(monkeypatch):
    """One that still held a tensor while Python ended would abort the process after its work was done."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in (alone | {"TORCHELASTIC_RUN_ID": "test"}).items():
        monkeypatch.setenv(name, value)
    before = gloo_threads()  # other tests' groups may have left some
    with process_group.process_group("cpu"):
        cycle: dict[str, object] = {"model": DistributedDataParallel(torch.nn.Linear(2, 2))}
        cycle["itself"] = cycle
        del cycle
        assert gloo_threads() - before
    assert gloo_threads() <= before
