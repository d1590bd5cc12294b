"""patch, unpatch, frames, plain_state_dict: a model's queries and keys on the Stiefel manifold, and back."""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import geoopt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import rewriting
from .carrying import RECORD, biases_of, carry, finite, fold, forget, plain_weights, plan_of
from .layouts import LayoutError, class_name, find
from .plain_keys import carriers_of, plain_state_dict
from .projections import Plan, factorise
from .report import Patched, PatchReport, Skipped
from .rewriting import unpatched

__all__ = ["PatchReport", "cores", "frames", "patch", "plain_state_dict", "unpatch", "unpatched"]

CORES = ("learn", "freeze", "identity")
LOOKS_LIKE_ATTENTION = re.compile("att(n|ention)", re.IGNORECASE)
Select = str | Iterable[str] | Callable[[str, nn.Module], bool]


@dataclass
class _Site:
    """One attention module under consideration: a plan, or the reason why there is none."""

    name: str
    module: nn.Module
    cls: str
    plan: Plan | None = None
    reason: str = ""

    @property
    def record(self) -> Patched | None:
        return getattr(self.module, RECORD, None)


def patch(model: nn.Module, *, core: str = "learn", select: Select | None = None) -> PatchReport:
    """Put the query and key projections of every attention module of `model` on the Stiefel manifold, in place.

    core     "learn": W = F·C with a trained Euclidean core C, the same function as before;
             "freeze": the same with C fixed; "identity": W = F alone, the function changes and the report says
             by how much.
    select   which attention modules, by name: a glob ("blocks.[0-5].*"), several, or a function
             (name, module) → bool. None: all.

    Build optimizers after it: the frames are new parameters. Patching a patched model changes nothing.
    Everything is checked first; on any error the model is as it was.

    Raises ValueError where nothing can be patched, where `select` matches nothing, and where a selected module
    cannot be patched; each with what was found.
    """
    _check(model, core)
    sites = _survey(model)
    chosen = _chosen(sites, select)
    _refuse_impossible(model, sites, chosen, select)
    for site in chosen:
        if site.plan is not None and site.record is None:
            _patch_site(site, core)
    names = [site.name for site in chosen if site.record is not None]
    rewriting.guard(model, names)
    return _report(sites)


def unpatch(model: nn.Module) -> None:
    """Fold the frames back: classes, keys, their order and the function are the plain model's again.

    Weights are the products F·C, so they equal the original ones up to rounding and, under the canonical
    factorisation, up to the gauge that leaves every logit as it is. Build optimizers after it.
    """
    for attention in _patched_modules(model):
        for projection in plan_of(attention).projections:
            if projection.frame_rows is not None:
                projection.frame_rows.refuse_lost_write()
                fold(projection, "unpatch(model)")
        forget(attention)
    rewriting.release(model)


def frames(model: nn.Module) -> Iterator[tuple[str, geoopt.ManifoldParameter]]:
    """Names and frames (n, d, r) of a patched model, as in `model.named_parameters()`."""
    for prefix, carried in carriers_of(model).items():
        for name, value in carried.named_frames():
            yield prefix + name, value


def cores(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and trained cores of a patched model: Euclidean parameters that weight decay must leave alone.

    Diagonal (n, r) or symmetric (n, r, r). Frozen cores are buffers and are not among them.
    """
    for prefix, carried in carriers_of(model).items():
        for name, value in carried.named_cores():
            if isinstance(value, nn.Parameter):
                yield prefix + name, value


def _check(model: nn.Module, core: str) -> None:
    if core not in CORES:
        raise ValueError(f"core must be one of {', '.join(map(repr, CORES))}; got {core!r}.")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("The model is wrapped in DistributedDataParallel already; patch it first, then wrap it.")
    for module in model.modules():
        record = getattr(module, RECORD, None)
        if record is not None and record.core != core:
            raise ValueError(
                f'The model is patched with core="{record.core}" already; got core="{core}". unpatch(model) first.'
            )


def _survey(model: nn.Module) -> list[_Site]:
    """Every module of a registered class, and every other one whose name says attention."""
    load_table()
    tied = _tied(model)
    sites = [_site(name, module, tied) for name, module in model.named_modules() if find(module) is not None]
    known = [site.name for site in sites]
    for name, module in model.named_modules():
        if _looks_like_attention(module) and not any(_related(name, other) for other in known):
            reason = "no layout is registered for this class; see register_attention"
            sites.append(_Site(name, module, class_name(type(module)), reason=reason))
            known.append(name)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(sites, key=lambda site: order[site.name])


def load_table() -> None:
    """Fill the registry; on first use, as imports go one way and the integrations stand above this file."""
    for library in ("timm", "transformers"):
        importlib.import_module(f"stiefel_geo.integrations.{library}_attention")


def _site(name: str, module: nn.Module, tied: set[int]) -> _Site:
    found = find(module)
    assert found is not None
    site = _Site(name, module, class_name(found[0]))
    try:
        plan = plan_of(module)
    except LayoutError as error:
        site.reason = str(error)
        return site
    if any(id(getattr(p.owner, p.tensor)) in tied for p in plan.projections if p.frame_rows is None):
        site.reason = "its weight is shared with another module"
    elif not finite(plan):
        site.reason = "its weight holds NaN or infinity"
    else:
        site.plan = plan
    return site


def _tied(model: nn.Module) -> set[int]:
    """Identities of parameters that more than one module holds."""
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {identity for identity, count in holders.items() if count > 1}


def _looks_like_attention(module: nn.Module) -> bool:
    named = LOOKS_LIKE_ATTENTION.search(type(module).__name__) is not None
    return named and any(True for _ in module.parameters())


def _related(name: str, other: str) -> bool:
    """One module lies in the other, or they are the same."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") or not (name and other)


def _chosen(sites: list[_Site], select: Select | None) -> list[_Site]:
    if select is None:
        return [site for site in sites if site.plan is not None]
    if callable(select):
        return [site for site in sites if select(site.name, site.module)]
    globs = [select] if isinstance(select, str) else list(select)
    return [site for site in sites if any(fnmatchcase(site.name, glob) for glob in globs)]


def _refuse_impossible(model: nn.Module, sites: list[_Site], chosen: list[_Site], select: Select | None) -> None:
    """Raise before anything changes."""
    impossible = [f"{site.name} ({site.cls}): {site.reason}" for site in chosen if site.plan is None]
    if impossible:
        raise ValueError("select names modules that cannot be patched:\n  " + "\n  ".join(impossible))
    if chosen:
        return
    if select is not None and sites:
        found = "\n  ".join(f"{site.name} ({site.cls})" for site in sites)
        raise ValueError(f"select={select!r} matches none of the model's attention modules:\n  {found}")
    raise ValueError(
        f"Nothing in this {type(model).__name__} can be patched. {_findings(model, sites)} For an attention class of "
        "your own see stiefel_geo.integrations.timm_attention.register_attention."
    )


def _findings(model: nn.Module, sites: list[_Site]) -> str:
    if sites:
        return "Found:\n  " + "\n  ".join(f"{site.name} ({site.cls}): {site.reason}" for site in sites) + "\n"
    leaves = Counter(class_name(type(m)) for m in model.modules() if not any(True for _ in m.children()))
    return "It holds " + ", ".join(f"{count} × {name}" for name, count in leaves.most_common(8)) + "."


def _patch_site(site: _Site, core: str) -> None:
    assert site.plan is not None
    shapes = site.plan.shapes()
    factors = factorise(site.plan, plain_weights(site.plan), biases_of(site.module, site.plan))
    carry(site.module, site.plan, factors, core)
    change = factors.change if core == "identity" else 0.0
    record = Patched(site.name, site.cls, factors.kind, core, shapes, change)
    setattr(site.module, RECORD, record)


def _report(sites: list[_Site]) -> PatchReport:
    patched = [site.record for site in sites if site.record is not None]
    skipped = [Skipped(site.name, site.cls, site.reason or "not selected") for site in sites if site.record is None]
    return PatchReport(patched, skipped)


def _patched_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, RECORD)]
