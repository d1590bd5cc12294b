"""Random sequences of what users do to a model and its optimizer: on the manifold, nothing lost, or a clear error.

`-m slow` (or RUN_SLOW=1) runs FUZZ_SEQUENCES (500) of them.
"""

import copy
import io
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.frame_parameters import gaussian
from support.patch_cases import randomise_, relative
from timm.models.vision_transformer import VisionTransformer
from timm.utils import ModelEmaV3
from torch import nn

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam, averaging, stiefel

SEQUENCES = int(os.environ.get("FUZZ_SEQUENCES", "500"))
SIZES: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 3}
DEFECT = {torch.float32: 1e-5, torch.float64: 1e-11}
CLOSE = {torch.float32: 2e-4, torch.float64: 1e-9}
halves = [torch.float32, torch.float64]


def build(qk_norm):
    return randomise_(VisionTransformer(**SIZES, qk_norm=qk_norm))


class Session(RuleBasedStateMachine):
    """One user's session: a small model, its optimizer, and what they do next."""

    @initialize(qk_norm=st.booleans(), core=st.sampled_from(["learn", "freeze"]))
    def begin(self, qk_norm, core):
        self.qk_norm, self.core, self.seed = qk_norm, core, 0
        self.dtype, self.patched, self.stale, self.extra = torch.float32, False, "", []
        self.model = build(qk_norm)
        self.keys = list(self.model.state_dict())
        self.build_optimizer()

    def build_optimizer(self):
        self.optimizer = ScaleFreeRiemannianAdam(stiefel_geo.param_groups(self.model, 0.05), lr=1e-2)
        self.stale, self.extra = "", []

    def replaced(self):
        """What a step must say where the optimizer holds a parameter that left the model."""
        own = {id(p) for p in (*self.model.parameters(), *self.extra)}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return "replaced by|was cast" if any(id(p) not in own for p in held) else ""

    def outputs(self):
        with torch.no_grad():
            return self.model.eval()(gaussian((2, 3, 8, 8), 1, self.dtype)).clone()

    def backward(self):
        self.seed += 1
        self.optimizer.zero_grad()
        self.model.zero_grad()
        loss = self.model.train()(gaussian((2, 3, 8, 8), self.seed, self.dtype)).square().sum()
        loss = loss + sum(p.square().sum() for p in self.extra)
        loss.backward()

    @rule(count=st.integers(1, 3))
    def step(self, count):
        for _ in range(count):
            self.backward()
            if self.stale:
                with pytest.raises((ValueError, RuntimeError), match=self.stale):
                    self.optimizer.step()
            else:
                self.optimizer.step()

    @precondition(lambda self: self.patched and not self.stale)
    @rule(bad=st.sampled_from([math.nan, math.inf, 1e38]))
    def step_with_a_bad_gradient_in_one_frame(self, bad):
        _, frame = next(stiefel_geo.frames(self.model))
        self.backward()
        if frame.grad is None:
            return
        before = frame.detach().clone()
        frame.grad[0, 0, 0] = bad
        self.optimizer.step()
        assert math.isfinite(bad) or torch.equal(frame[0], before[0])

    @precondition(lambda self: not self.patched)
    @rule()
    def patch(self):
        before = self.outputs()
        stiefel_geo.patch(self.model, core=self.core)
        assert relative(self.outputs(), before) < CLOSE[self.dtype]
        self.patched, self.stale = True, self.replaced()

    @precondition(lambda self: self.patched)
    @rule()
    def patch_again(self):
        before = copy.deepcopy(self.model.state_dict())
        stiefel_geo.patch(self.model, core=self.core)
        assert all(torch.equal(value, before[key]) for key, value in self.model.state_dict().items())

    @precondition(lambda self: self.patched)
    @rule()
    def unpatch(self):
        before = self.outputs()
        stiefel_geo.unpatch(self.model)
        assert relative(self.outputs(), before) < CLOSE[self.dtype]
        self.patched, self.stale = False, self.replaced()

    @rule()
    def rebuild_the_optimizer(self):
        self.build_optimizer()

    @precondition(lambda self: not self.stale and not self.extra)
    @rule()
    def save_and_go_on_in_a_fresh_model(self):
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        before, trained = self.outputs(), {n: p.requires_grad for n, p in self.model.named_parameters()}
        self.model = build(self.qk_norm).to(self.dtype)
        if self.patched:
            stiefel_geo.patch(self.model, core=self.core)
        self.model.load_state_dict(saved["model"], strict=True)
        for name, p in self.model.named_parameters():
            p.requires_grad_(trained[name])
        assert torch.equal(self.outputs(), before)
        self.build_optimizer()
        if [len(group["params"]) for group in self.optimizer.param_groups] == [
            len(group["params"]) for group in saved["optimizer"]["param_groups"]
        ]:
            self.optimizer.load_state_dict(saved["optimizer"])

    @rule()
    def export_and_load_plain(self):
        plain = build(self.qk_norm).to(self.dtype)
        plain.load_state_dict(stiefel_geo.plain_state_dict(self.model), strict=True)
        with torch.no_grad():
            exported = plain.eval()(gaussian((2, 3, 8, 8), 1, self.dtype))
        assert relative(exported, self.outputs()) < CLOSE[self.dtype]

    @precondition(lambda self: not self.stale and len(self.extra) < 2)
    @rule()
    def add_a_group(self):
        extra = nn.Parameter(gaussian((3,), self.seed, self.dtype))
        self.optimizer.add_param_group({"params": [extra], "lr": 1e-3})
        self.extra.append(extra)

    @rule(part=st.sampled_from(["blocks", "head", "patch_embed"]), trained=st.booleans())
    def freeze_or_thaw(self, part, trained):
        self.model.get_submodule(part).requires_grad_(trained)
        frozen = {n: p.detach().clone() for n, p in self.model.named_parameters() if not p.requires_grad}
        if self.stale or len(frozen) == len(list(self.model.parameters())):
            return
        self.step(1)
        assert all(torch.equal(p, frozen[n]) for n, p in self.model.named_parameters() if n in frozen)

    @rule(updates=st.integers(1, 3))
    def average_and_go_on_with_the_average(self, updates):
        average = ModelEmaV3(self.model, decay=0.5)
        for _ in range(updates):
            if not self.stale:
                self.step(1)
            average.update(self.model)
        averaging.project_frames_(average.module)
        copied = average.module
        for (name, p), q in zip(self.model.named_parameters(), copied.parameters(), strict=True):
            assert type(p) is type(q), name
            q.requires_grad_(p.requires_grad)
        self.model = copied
        self.build_optimizer()

    @rule(dtype=st.sampled_from(halves))
    def cast(self, dtype):
        changed, had_state = dtype != self.dtype, bool(self.optimizer.state)
        before = self.outputs()
        self.model.to(dtype)
        self.dtype = dtype
        assert relative(self.outputs().double(), before.double()) < CLOSE[torch.float32]
        if changed and had_state and not self.stale:
            self.stale = "was cast"
        if self.stale == "was cast" or self.extra:
            self.build_optimizer()

    @invariant()
    def frames_are_on_the_manifold(self):
        for name, frame in stiefel_geo.frames(self.model):
            assert float(stiefel.defect(frame).max()) < DEFECT[torch.float32], name

    @invariant()
    def outputs_are_finite(self):
        assert self.outputs().isfinite().all()

    @invariant()
    def optimizer_drives_every_trained_frame(self):
        if not self.stale and not self.frozen_since():
            trained = (frame for _, frame in stiefel_geo.frames(self.model) if frame.requires_grad)
            assert self.optimizer.num_frames >= sum(len(frame) for frame in trained)

    def frozen_since(self):
        """Whether something was thawed that the optimizer was built without."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return any(p.requires_grad and id(p) not in held for p in self.model.parameters())

    @invariant()
    def plain_keys_are_the_models_own(self):
        assert list(stiefel_geo.plain_state_dict(self.model)) == self.keys


def run(count, length):
    run_state_machine_as_test(
        Session,
        settings=settings(
            max_examples=count, stateful_step_count=length, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        ),
    )  # fmt: skip


def test_sequences_of_operations_keep_frames_and_functions():
    run(20, 10)


@pytest.mark.slow
def test_sequences_of_operations_keep_frames_and_functions_at_length():
    run(SEQUENCES, 12)
