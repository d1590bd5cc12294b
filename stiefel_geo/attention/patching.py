"""patch, frames, cores: a model's queries and keys on the Stiefel manifold."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import sqrt

import geoopt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .installing import install
from .layouts import LayoutError, class_name, find
from .parametrization import FrameRows
from .projections import Projection, frame_rows_of, projections_of
from .report import Patched, PatchReport, Skipped
from .state_dicts import frame_rows_by_prefix, plain_state_dict
from .unpatching import guard, unpatch, unpatched

__all__ = ["PatchReport", "cores", "frames", "patch", "plain_state_dict", "unpatch", "unpatched"]

CORES = ("learn", "freeze", "identity")
LOOKS_LIKE_ATTENTION = re.compile("att(n|ention)", re.IGNORECASE)
Select = str | Iterable[str] | Callable[[str, nn.Module], bool]


@dataclass
class _Site:
    """One attention module under consideration: what is to be patched, or the reason why nothing can be."""

    name: str
    module: nn.Module
    cls: str
    projections: list[Projection] = field(default_factory=list)  # those that are plain
    reason: str = ""

    @property
    def patched(self) -> bool:
        return bool(frame_rows_of(self.module))


@torch.inference_mode(False)
def patch(model: nn.Module, *, core: str = "learn", select: Select | None = None) -> PatchReport:
    """Put the query and key projections of every attention module of `model` on the Stiefel manifold, in place.

    Build optimizers after it: the frames are new parameters. Patching a patched model changes nothing.
    Everything is checked first; on any error the model is as it was.

    Args:
        model: any model with attention modules that timm's or transformers' tables or `register_attention` name.
        core: "learn": W = F·C with a trained Euclidean core C, the same function as before; "freeze": the same with
            C fixed; "identity": W = F alone, the function changes and the report says by how much.
        select: which attention modules, by name: a glob ("blocks.[0-5].*"), several, or a function
            (name, module) → bool. None: all.

    Raises:
        ValueError: nothing can be patched, `select` matches nothing, or a selected module cannot be patched; each
            with what was found.
    """
    _check(model, core)
    sites = _survey(model)
    chosen = _chosen(sites, select)
    _refuse_impossible(model, sites, chosen, select)
    made = [(p, FrameRows(p.rows, getattr(p.owner, p.tensor), core)) for site in chosen for p in site.projections]
    for projection, made_by in made:
        made_by.order = tuple(projection.owner._parameters)
    for projection, made_by in made:
        install(projection.owner, projection.tensor, made_by, "patch(model)")
    guard(model)
    return PatchReport(
        [_patched(site) for site in sites if site.patched],
        [Skipped(site.name, site.cls, site.reason or "not selected") for site in sites if not site.patched],
    )


def frames(model: nn.Module) -> Iterator[tuple[str, geoopt.ManifoldParameter]]:
    """Names and frames (n, d, r) of a patched model, as in `model.named_parameters()`."""
    for prefix, made_by in frame_rows_by_prefix(model).items():
        for name, value in made_by.named_frames():
            yield prefix + name, value


def cores(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and trained cores of a patched model: Euclidean parameters that weight decay must leave alone.

    Symmetric (n, r, r): the symmetric part is what acts. Frozen cores are buffers and are not among them.
    """
    for prefix, made_by in frame_rows_by_prefix(model).items():
        for name, value in made_by.named_cores():
            if isinstance(value, nn.Parameter):
                yield prefix + name, value


def _check(model: nn.Module, core: str) -> None:
    if core not in CORES:
        raise ValueError(f"core must be one of {', '.join(map(repr, CORES))}; got {core!r}.")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("The model is wrapped in DistributedDataParallel already; patch it first, then wrap it.")
    for module in model.modules():
        if isinstance(module, FrameRows) and module.core_mode != core:
            raise ValueError(
                f'The model is patched with core="{module.core_mode}" already; got core="{core}". unpatch(model) first.'
            )


def _survey(model: nn.Module) -> list[_Site]:
    """Every module of a registered class, and every other one whose name says attention."""
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


def _site(name: str, module: nn.Module, tied: set[int]) -> _Site:
    found = find(module)
    assert found is not None
    site = _Site(name, module, class_name(found[0]))
    try:
        projections = [p for p in projections_of(module) if p.frame_rows is None]
    except LayoutError as error:
        site.reason = str(error)
        return site
    weights = [getattr(p.owner, p.tensor) for p in projections]
    if any(id(weight) in tied for weight in weights):
        site.reason = "its weight is shared with another module"
    elif not all(weight.is_meta or bool(torch.isfinite(weight).all()) for weight in weights):
        site.reason = "its weight holds NaN or infinity"
    else:
        site.projections = projections
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
        return [site for site in sites if site.patched or site.projections]
    if callable(select):
        return [site for site in sites if select(site.name, site.module)]
    globs = [select] if isinstance(select, str) else list(select)
    return [site for site in sites if any(fnmatchcase(site.name, glob) for glob in globs)]


def _refuse_impossible(model: nn.Module, sites: list[_Site], chosen: list[_Site], select: Select | None) -> None:
    """Raise before anything changes."""
    impossible = [f"{site.name} ({site.cls}): {site.reason}" for site in chosen if site.reason and not site.patched]
    if impossible:
        raise ValueError("select names modules that cannot be patched:\n  " + "\n  ".join(impossible))
    if chosen:
        return
    if select is not None and sites:
        found = "\n  ".join(f"{site.name} ({site.cls})" for site in sites)
        raise ValueError(f"select={select!r} matches none of the model's attention modules:\n  {found}")
    raise ValueError(
        f"Nothing in this {type(model).__name__} can be patched. {_findings(model, sites)} For an attention class of "
        "your own see stiefel_geo.register_attention."
    )


def _findings(model: nn.Module, sites: list[_Site]) -> str:
    if sites:
        return "Found:\n  " + "\n  ".join(f"{site.name} ({site.cls}): {site.reason}" for site in sites) + "\n"
    leaves = Counter(class_name(type(m)) for m in model.modules() if not any(True for _ in m.children()))
    return "It holds " + ", ".join(f"{count} × {name}" for name, count in leaves.most_common(8)) + "."


def _patched(site: _Site) -> Patched:
    made_by = frame_rows_of(site.module)
    shapes = tuple((n, d, r) for each in made_by for _, F in each.named_frames() for n, d, r in [F.shape])
    difference, value = (sum(column) for column in zip(*(each.lost for each in made_by), strict=True))
    return Patched(site.name, site.cls, made_by[0].core_mode, shapes, sqrt(difference / value))
