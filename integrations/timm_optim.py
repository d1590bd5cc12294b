"""timm's optimizer factory.

    stiefel_geo.integrations.timm_optim.register_optimizer()

registers the optimizer with timm, for `train.py --opt scalefreeradam` and for

    timm.optim.create_optimizer_v2(model, opt="scalefreeradam", lr=1e-3, weight_decay=0.05, layer_decay=0.75)

timm then makes the groups, by names that it takes for the patched model's own: no decay on frames and cores all the
same, since the optimizer knows them; `stiefel_geo.param_groups` gives the same scales and readable names. timm reads
names at "_", so "lookahead_scalefreeradam" is timm's Lookahead around it.
"""

from timm.optim._optim_factory import OptimInfo, default_registry

from stiefel_geo.optim import ScaleFreeRiemannianAdam


def register_optimizer() -> None:
    """Let timm's `create_optimizer_v2` know "scalefreeradam". Calling it again changes nothing."""
    default_registry.register(
        OptimInfo(
            name="scalefreeradam",
            opt_class=ScaleFreeRiemannianAdam,
            description="Riemannian Adam with one scalar second moment per frame; AdamW for Euclidean parameters",
            has_betas=True,
        )
    )
