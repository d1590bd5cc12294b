"""The method again, slow and literal: one frame, numpy float64, formulas in the order of DESIGN.md §1.

Nothing is shared with the library: the retraction is an SVD, the norms are numpy's.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
NOISE = 16 * np.finfo(np.float64).eps


def project(W: Matrix, G: Matrix) -> Matrix:
    A = W.T @ G
    return G - W @ ((A + A.T) / 2)


def polar(Y: Matrix) -> Matrix:
    U, _, Vt = np.linalg.svd(Y, full_matrices=False)
    Q: Matrix = U @ Vt
    return Q


@dataclass
class Frame:
    W: Matrix
    m: Matrix = field(init=False)
    v: float = 0.0
    t: int = 0

    def __post_init__(self) -> None:
        self.m = np.zeros_like(self.W)

    def step(
        self,
        G: Matrix,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        trust_radius: float = 1.0,
    ) -> None:
        if not np.isfinite(G).all():
            return
        beta1, beta2 = betas
        self.t += 1
        g = project(self.W, G)
        if np.linalg.norm(g) <= NOISE * np.linalg.norm(G):
            g = np.zeros_like(g)
        self.m = project(self.W, beta1 * self.m + (1 - beta1) * g)
        self.v = beta2 * self.v + (1 - beta2) * float(np.linalg.norm(g)) ** 2 / g.size
        if self.v == 0 or np.linalg.norm(self.m) <= NOISE * np.linalg.norm(G):
            return
        m_hat = self.m / (1 - beta1**self.t)
        v_hat = self.v / (1 - beta2**self.t)
        xi = -lr * m_hat / np.sqrt(v_hat)
        length = np.linalg.norm(xi)
        if length > trust_radius:
            xi = xi * (trust_radius / length)
        if length > 0:
            self.W = polar(self.W + xi)
