"""Batches of labelled images for the framework examples: the one module that they share, to be copied along."""

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from timm.data import create_dataset, create_loader, resolve_model_data_config
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Loaders = tuple[DataLoader[Any], DataLoader[Any]]  # to train, to test


def digits(batch_size: int, limit: int | None = None) -> Loaders:
    """scikit-learn's 1,797 digits as (3, 32, 32) images from −1 to 1: a quarter to test, at most `limit` to train."""
    values, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(values).float().view(-1, 1, 8, 8) / 8 - 1
    images = small.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
    order, targets = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)), torch.from_numpy(labels)
    part = len(labels) // 4
    test, train = (TensorDataset(images[i], targets[i]) for i in (order[:part], order[part:][:limit]))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(test, 2 * batch_size)


def folder(root: Path, model: nn.Module, img_size: int | None, batch_size: int, device: str) -> Loaders:
    """Folders `train` and `validation` below `root`, one folder a class, by timm's loaders as `model` wants them."""
    config = resolve_model_data_config(model, {"img_size": img_size})
    shape = {key: config[key] for key in ("input_size", "mean", "std", "interpolation")}
    train, test = (
        create_loader(
            create_dataset("", root=str(root), split=split), batch_size=batch_size, is_training=split == "train",
            num_workers=4 if device == "cuda" else 0, persistent_workers=False, use_prefetcher=False,
            pin_memory=device == "cuda", **shape,
        )
        for split in ("train", "validation")
    )  # fmt: skip
    return train, test
