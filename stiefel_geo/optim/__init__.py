"""The optimizer: `step.py` is the paper's page, the rest is what it takes to apply it to a model."""

from .optimizer import ScaleFreeRiemannianAdam

__all__ = ["ScaleFreeRiemannianAdam"]
