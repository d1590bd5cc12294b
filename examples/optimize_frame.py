"""The optimizer alone: the leading eigenspace of a covariance matrix, as one frame on St(64, 8).

    python examples/optimize_frame.py

Maximises tr(WᵀCW) over frames W, whose maximisers span the eight leading eigenvectors of C (Ky Fan),
for the covariance C of scikit-learn's digits, and compares with the eigendecomposition.
"""

import argparse
from collections.abc import Sequence

import geoopt
import torch
from sklearn.datasets import load_digits

import stiefel_geo


def main(argv: Sequence[str] | None = None) -> int:
    """Optimise, print the distance to the truth, and fail (exit code 1) if it is not small."""
    parser = argparse.ArgumentParser(description="leading eigenspace of a covariance matrix")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="300 steps")
    args = parser.parse_args(argv)
    steps = 300 if args.smoke else args.steps

    torch.manual_seed(args.seed)
    C = torch.from_numpy(load_digits().data).T.cov()  # (64, 64), float64
    manifold = stiefel_geo.PolarStiefel()
    W = geoopt.ManifoldParameter(manifold.random(64, 8, dtype=C.dtype), manifold=manifold)
    optimizer = stiefel_geo.ScaleFreeRiemannianAdam([W], lr=0.03, maximize=True)
    # The step's length does not shrink with the gradient (that is scale freedom): the schedule ends the walk.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    for _ in range(steps):
        optimizer.zero_grad()
        (W.mT @ C @ W).trace().backward()
        optimizer.step()
        schedule.step()

    eigenvectors = torch.linalg.eigh(C).eigenvectors[:, -8:]
    frame = W.detach()
    distance = torch.linalg.matrix_norm(frame @ frame.mT - eigenvectors @ eigenvectors.mT).item()
    defect = stiefel_geo.stiefel.defect(frame).item()
    print(f"{steps} steps: distance to the true eigenspace {distance:.1e}, defect {defect:.1e}")
    return 0 if distance < 1e-3 and defect < 1e-10 else 1


if __name__ == "__main__":
    raise SystemExit(main())
