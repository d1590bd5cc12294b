"""The step once more as a literal torch optimizer, sound or with one fault: what certificates have to tell apart."""

import functools
from collections.abc import Callable, Iterable

import geoopt
import torch
from torch import Tensor

NOISE = 16 * torch.finfo(torch.float64).eps


def broken(fault: str | None) -> Callable[..., torch.optim.Optimizer]:
    """A factory with the signature of ScaleFreeRiemannianAdam. None: the sound step.

    Faults: "no projection", "no transport", "element-wise moment", "epsilon in the root", "no cap", "QR retraction",
    "decay applied", "no noise floor".
    """
    return functools.partial(LiteralStep, fault=fault)


def size(X: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(X, keepdim=True)


class LiteralStep(torch.optim.Optimizer):
    """DESIGN.md §1, line by line, in float64. Euclidean parameters descend along their gradients."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        trust_radius: float = 1.0,
        *,
        fault: str | None = None,
    ) -> None:
        self.fault = fault
        super().__init__(params, {"lr": lr, "betas": betas, "decay": weight_decay, "trust_radius": trust_radius})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, geoopt.ManifoldParameter):
                    p.copy_(self.step_frame(p.detach(), p.grad, self.state[p], **group))
                elif p.grad is not None:
                    p.sub_(group["lr"] * p.grad)

    def step_frame(
        self, W: Tensor, G: Tensor, state: dict, lr: float, betas: tuple, decay: float, trust_radius: float, **_: object
    ) -> Tensor:
        if not state:
            state.update(exp_avg=torch.zeros_like(W), v=torch.zeros_like(W), t=0)
        state["t"] += 1
        g = self.project(W, G)
        noise = (size(g) <= NOISE * size(G)) & (self.fault != "no noise floor")
        m = betas[0] * state["exp_avg"] + (1 - betas[0]) * g
        m = m if self.fault == "no transport" else self.project(W, m)
        g = torch.where(noise, 0.0, g)
        mean_square = g.square()
        if self.fault != "element-wise moment":
            mean_square = mean_square.mean((-2, -1), keepdim=True)
        state["v"].mul_(betas[1]).add_((1 - betas[1]) * mean_square)
        state["exp_avg"] = m
        root = (state["v"] / (1 - betas[1] ** state["t"])).sqrt()
        if self.fault == "epsilon in the root":
            root = root + 1e-8
        xi = torch.where(root > 0, -lr * (m / (1 - betas[0] ** state["t"])) / root, 0.0)
        if self.fault != "no cap":
            xi = xi * (trust_radius / size(xi)).nan_to_num(nan=1.0).clamp(max=1.0)
        V = torch.where((xi == 0).all(-1, keepdim=True).all(-2, keepdim=True), W, self.retract(W + xi))
        return V * (1 - lr * decay) if self.fault == "decay applied" else V

    def project(self, W: Tensor, G: Tensor) -> Tensor:
        A = W.mT @ G
        return G if self.fault == "no projection" else G - W @ (A + A.mT) / 2

    def retract(self, Y: Tensor) -> Tensor:
        if self.fault == "QR retraction":
            Q, R = torch.linalg.qr(Y)
            return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        U, _, Vh = torch.linalg.svd(Y, full_matrices=False)
        return U @ Vh
