"""Random runs of the optimizer against its literal twin.

`-m slow` (or RUN_SLOW=1) runs the same property on FUZZ_EXAMPLES (5,000) examples.
"""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import reference
from support.frame_parameters import as_frame, gaussian, optimizer_of

from stiefel_geo import stiefel

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5000"))
PATIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
PHASES = (Phase.generate,)

sizes = st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda pair: (max(pair), min(pair)))
leading = st.lists(st.integers(1, 3), max_size=2).map(tuple)
betas = st.tuples(st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999]), st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999]))


@st.composite
def runs(draw):
    """A batch of frames, settings, and for each step an lr, a scale and perhaps a frame without a usable gradient."""
    lead, size = draw(leading), draw(sizes)
    steps = draw(st.integers(1, 12))
    peak = draw(st.floats(-6, 1).map(lambda x: 10**x))
    shape = draw(st.sampled_from(["constant", "warm-up", "cosine", "jumps"]))
    factors = {
        "constant": [1.0] * steps,
        "warm-up": [(t + 1) / steps for t in range(steps)],
        "cosine": [0.5 + 0.5 * math.cos(math.pi * t / steps) for t in range(steps)],
        "jumps": draw(st.lists(st.sampled_from([0.0, 1.0, 1e-3]), min_size=steps, max_size=steps)),
    }[shape]
    return {
        "shape": (*lead, *size),
        "seed": draw(st.integers(0, 2**31)),
        "betas": draw(betas),
        "trust_radius": draw(st.sampled_from([1e-3, 0.1, 1.0, 3.0])),
        "maximize": draw(st.booleans()),
        "foreach": draw(st.sampled_from([None, True, False])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])),
        "lrs": [peak * factor for factor in factors],
        "scale": 10.0 ** draw(st.integers(-30, 30)),
        "bad": draw(st.lists(st.sampled_from([None, None, 0.0, math.nan, math.inf]), min_size=steps, max_size=steps)),
    }


def compare(run):
    """Before every step the twins take over the state; after it, theirs and the optimizer's must agree."""
    dtype, shape = run["dtype"], run["shape"]
    generator = torch.Generator().manual_seed(run["seed"])
    exact = stiefel.random_frame(*shape, dtype=torch.promote_types(dtype, torch.float32), generator=generator)
    p = as_frame(exact.to(dtype))
    optimizer = optimizer_of([p], **{key: run[key] for key in ("betas", "trust_radius", "maximize", "foreach")})
    state = begin(optimizer, p, exact)
    for t, (lr, bad) in enumerate(zip(run["lrs"], run["bad"], strict=True)):
        G = (gaussian(shape, run["seed"] + t + 1) * run["scale"]).to(dtype)
        if bad is not None:
            G.view(-1, *shape[-2:])[0] = bad
        sign = -1.0 if run["maximize"] else 1.0
        twins = twins_of(p, state, sign)
        optimizer.param_groups[0]["lr"] = lr
        p.grad = G
        optimizer.step()
        signed = (sign * G).double().reshape(-1, *shape[-2:]).numpy()
        conditions = [condition(twin, matrix) for twin, matrix in zip(twins, signed, strict=True)]
        for twin, matrix in zip(twins, signed, strict=True):
            twin.step(matrix, lr, run["betas"], run["trust_radius"])
        for ours, twin, kappa, matrix in zip(twins_of(p, state, sign), twins, conditions, signed, strict=True):
            agree(ours, twin, torch.finfo(exact.dtype).eps * kappa, matrix)


def begin(optimizer, p, exact):
    """The state before the first step, with a master that is on the manifold where `p` itself is too coarse for it."""
    p.grad = torch.zeros_like(p)
    optimizer.step()
    state = optimizer.state[p]
    state["step"].zero_()
    if "master" in state:
        state["master"].copy_(exact)
    return state


def twins_of(p, state, sign):
    """Every frame with its state as a literal twin, in float64; the twin descends, so ascent negates its momentum."""
    d, r = p.shape[-2:]
    twins = [reference.Frame(W) for W in state.get("master", p).detach().double().reshape(-1, d, r).numpy().copy()]
    for i, twin in enumerate(twins):
        twin.m = sign * state["exp_avg"][i].double().numpy().copy()
        twin.v, twin.t = float(state["exp_avg_sq"][i]), int(state["step"][i])
    return twins


def condition(twin, G):
    """‖G‖/‖P_W(G)‖: how much the subtraction of the normal part enlarges the rounding error of g."""
    if not np.isfinite(G).all() or not G.any():
        return 1.0
    cosine = np.linalg.norm(reference.project(twin.W, G)) / np.linalg.norm(G)
    return 1 / cosine if cosine > 1e-300 else math.inf


def agree(ours, twin, error, G):
    """Equal up to `error`, the rounding error of the gradient's tangent part; both may also have called it noise."""
    if error > 0.05:
        return
    assert ours.t == twin.t
    assert abs(ours.v - twin.v) <= 100 * error * max(twin.v, 1e-300)
    size = max(np.linalg.norm(G), np.linalg.norm(twin.m)) if np.isfinite(G).all() else np.linalg.norm(twin.m)
    assert np.linalg.norm(ours.m - twin.m) <= 50 * error * size
    assert np.abs(ours.W - twin.W).max() <= 300 * error, np.abs(ours.W - twin.W).max() / error
    defect = np.linalg.norm(ours.W.T @ ours.W - np.eye(ours.W.shape[1]))
    assert defect <= (1e-11 if error < 1e-9 else 1e-5)


@given(runs())
@settings(PATIENT, max_examples=100, phases=PHASES)
def test_optimizer_follows_its_literal_twin(run):
    compare(run)


@pytest.mark.slow
@given(runs())
@settings(PATIENT, max_examples=EXAMPLES, phases=PHASES)
def test_optimizer_follows_its_literal_twin_at_length(run):
    compare(run)
