"""examples/finetuning/atomic_files.py: whole files or none."""

import pytest
import torch
from support.example_scripts import atomic_files


def test_state_comes_back_as_it_was(tmp_path):
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = {"weights": weights, "rows": [{"loss": 0.1, "arm": "adamw"}], "step": 7}
    atomic_files.save_state(tmp_path / "state.pt", state)
    loaded = atomic_files.load_state(tmp_path / "state.pt")
    assert torch.equal(loaded["weights"], weights)
    assert loaded == {**state, "weights": loaded["weights"]}


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")

    def write(part):
        part.write_bytes(b"half of the new")
        raise failure

    with pytest.raises(type(failure)):
        atomic_files.write_atomically(path, write)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"state.pt": b"old"}


def test_the_new_name_appears_only_after_its_content_is_on_disk(tmp_path, monkeypatch):
    path, synced = tmp_path / "state.pt", []
    monkeypatch.setattr(atomic_files.os, "fsync", lambda handle: synced.append(path.exists()))
    atomic_files.write_atomically(path, lambda part: part.write_bytes(b"new"))
    assert synced == [False, True]  # the file before the rename, the folder after it


def test_every_flipped_byte_of_the_tensors_is_noticed(tmp_path):
    path = tmp_path / "state.pt"
    atomic_files.save_state(path, {"weights": torch.zeros(1000)})
    whole = path.read_bytes()
    start = whole.index(bytes(4000))
    for offset in range(start, start + 4000, 500):
        path.write_bytes(whole[:offset] + b"\x01" + whole[offset + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            atomic_files.load_state(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_does_not_load(tmp_path, share):
    path = tmp_path / "state.pt"
    atomic_files.save_state(path, {"weights": torch.zeros(1000)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(Exception, match=r"zip|damaged"):
        atomic_files.load_state(path)
