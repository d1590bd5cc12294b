"""Where an attention module's query and key rows are: layouts as data, and the registry of classes.

Nothing here knows a library. `stiefel_geo.integrations.timm_attention` fills the registry by class name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

Order = str | Callable[[Any], str]  # the words of a projection's rows, or a function of the module
Orders = Mapping[str, Order]
Size = int | str | Callable[[Any], int]  # a number, an attribute's name, or a function of the module


class LayoutError(ValueError):
    """The module found is not what its layout says."""


@dataclass(frozen=True)
class Run:
    """Neighbouring rows: heads of `width` rows, `roles` naming each "q" or "k"; roles = "": left as they are."""

    roles: str
    width: int

    @property
    def rows(self) -> int:
        return self.width * (len(self.roles) or 1)


@dataclass(frozen=True)
class Rows:
    """How the rows of one weight fall into heads: `groups` repetitions of the same runs."""

    groups: int
    runs: tuple[Run, ...]
    transposed: bool = False  # the weight is stored (d, rows)

    @property
    def roles(self) -> list[str]:
        """Roles of each stack's frames, in the order of the rows."""
        return [run.roles * self.groups for run in self.runs if run.roles]

    @property
    def widths(self) -> list[int]:
        return [run.width for run in self.runs if run.roles]

    def split(self, matrix: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """(rows, d) → stacks (n, d, r), one per run of heads, and the remaining rows (m, d)."""
        grouped = rearrange(matrix.mT if self.transposed else matrix, "(group row) d -> group row d", group=self.groups)
        pieces = torch.split(grouped, [run.rows for run in self.runs], dim=1)
        stacks, rest = [], []
        for run, piece in zip(self.runs, pieces, strict=True):
            if run.roles:
                stacks.append(rearrange(piece, "group (head r) d -> (group head) d r", r=run.width))
            else:
                rest.append(piece)
        return stacks, rearrange(torch.cat(rest, 1), "group row d -> (group row) d") if rest else None

    def join(self, heads: Sequence[Tensor], rest: Tensor | None) -> Tensor:
        """Inverse of `split`, from heads as rows (n, r, d)."""
        stacks, remaining = iter(heads), iter(self._cut(rest))
        pieces = [
            rearrange(next(stacks), "(group head) r d -> group (head r) d", group=self.groups)
            if run.roles
            else next(remaining)
            for run in self.runs
        ]
        if self.transposed:
            return rearrange(torch.cat(pieces, 1), "group row d -> d (group row)").contiguous()
        return rearrange(torch.cat(pieces, 1), "group row d -> (group row) d")

    def _cut(self, rest: Tensor | None) -> Sequence[Tensor]:
        """The remaining rows, run by run: (groups, rows of the run, d)."""
        sizes = [run.rows for run in self.runs if not run.roles]
        if rest is None:
            return ()
        return torch.split(rearrange(rest, "(group row) d -> group row d", group=self.groups), sizes, dim=1)


@dataclass(frozen=True)
class Layout:
    """Where one attention class keeps its queries and keys.

    Attributes:
        rows: projection → order of its rows. "q k v": all heads of q, then of k, then of v. "(q k v)": head by head.
            Any other word stands for rows that are left as they are. A projection that an instance does not have
            (absent or None) is passed over, so fused and separate forms share a row; "qkvs.*.conv" stands for one
            per index.
        heads: query heads in one projection.
        kv_heads: key heads, where they differ.
        width: rows of one head in q and k; None: the projection's rows in equal parts.
        k_width: rows of one head in k, where they differ from q's.
        ahead: rows of the word "mlp".
        groups: how often the words in parentheses repeat, where it is not once per head.
        transposed: whether weights are stored (columns, rows), as in a Conv1D of GPT-2.
        skip: why the class is left alone although it projects queries and keys.
    """

    rows: Orders = field(default_factory=dict)
    heads: Size = "num_heads"
    kv_heads: Size | None = None
    width: Size | None = None
    k_width: Size | None = None
    ahead: Size = 0
    groups: Size | None = None
    transposed: bool = False
    skip: str = ""

    def order(self, path: str, module: nn.Module) -> str:
        order = self.rows[path]
        return order if isinstance(order, str) else order(module)

    def arrange(self, order: str, total: int, module: nn.Module) -> Rows:
        """The rows of one projection with `total` rows. Raises LayoutError where the sizes do not fit."""
        words = order.strip("()").split()
        heads = _size(self.heads, module)
        heads_of = {"q": heads, "k": heads if self.kv_heads is None else _size(self.kv_heads, module)}
        heads_of["v"] = heads_of["k"]
        groups = self._groups(words, heads_of, module) if order.startswith("(") else 1
        if total % groups or any(heads_of[word] % groups for word in words if word in heads_of):
            raise LayoutError(f"{total} rows of {heads_of} heads do not divide into {groups} equal groups")
        heads_of = {word: number // groups for word, number in heads_of.items()}
        width = self._widths(words, total // groups, heads_of, module)
        runs = _runs(words, total // groups, heads_of, width)
        return Rows(groups, runs, self.transposed)

    def _groups(self, words: list[str], heads: Mapping[str, int], module: nn.Module) -> int:
        """A layout's `groups`, or else one per head of the first word."""
        return heads[words[0]] if self.groups is None else _size(self.groups, module)

    def _widths(self, words: list[str], total: int, heads: Mapping[str, int], module: nn.Module) -> dict[str, int]:
        parts = sum(heads.get(word, 0) for word in words)
        if self.width is None and total % parts:
            raise LayoutError(f"{total} rows do not divide into {parts} equal heads of {' + '.join(words)}")
        q = total // parts if self.width is None else _size(self.width, module)
        k = q if self.k_width is None else _size(self.k_width, module)
        return {"q": q, "k": k, "mlp": _size(self.ahead, module)}


def _size(size: Size, module: nn.Module) -> int:
    if isinstance(size, str):
        return int(attrgetter(size)(module))
    return size if isinstance(size, int) else size(module)


def _runs(words: list[str], total: int, heads: Mapping[str, int], width: Mapping[str, int]) -> tuple[Run, ...]:
    """Runs of one group of `total` rows; what q, k and "mlp" leave over belongs to the remaining word."""
    known = {word: width[word] * heads.get(word, 1) for word in words if word in width}
    others = [word for word in words if word not in width]
    left = total - sum(known.values())
    if left < 0 or len(others) > 1 or bool(left) != bool(others):
        raise LayoutError(f"{total} rows are not {' + '.join(words)} with {known}")
    runs: list[Run] = []
    for word in words:
        run = Run(word * heads[word], width[word]) if word in ("q", "k") else Run("", known.get(word, left))
        if runs and run.roles and runs[-1].roles and runs[-1].width == run.width:
            run = Run(runs.pop().roles + run.roles, run.width)  # one stack for heads of one width
        runs.append(run)
    return tuple(runs)


Rule = Callable[[nn.Module], Layout | None]

_REGISTRY: dict[str, Layout] = {}
_RULES: list[Rule] = []


def class_name(cls: type) -> str:
    """The name that layouts are registered under: "package.module.Class"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register(name: str, layout: Layout) -> None:
    """Set the layout of the class with this qualified name, "package.module.Class"."""
    _REGISTRY[name] = layout


def register_rule(rule: Rule) -> None:
    """Ask `rule` for the layout of modules of which no class is registered; None: it does not know either."""
    _RULES.append(rule)


def find(module: nn.Module) -> tuple[type, Layout] | None:
    """The nearest registered class of a module and its layout, or its class and the layout that a rule gives it."""
    for cls in type(module).__mro__:
        if (layout := _REGISTRY.get(class_name(cls))) is not None:
            return cls, layout
    layouts = (rule(module) for rule in _RULES)
    return next(((type(module), layout) for layout in layouts if layout is not None), None)


def register_attention(cls: type[nn.Module], layout: Layout) -> None:
    """Let `patch` handle another attention class.

        class MyAttention(nn.Module):
            def __init__(self, dim, heads):
                self.heads = heads
                self.to_q = nn.Linear(dim, dim)
                self.to_kv = nn.Linear(dim, 2 * dim)   # rows: all heads of k, then of v
                ...

        register_attention(MyAttention, Layout({"to_q": "q", "to_kv": "k v"}, heads="heads"))

    What happens to queries and keys afterwards does not matter. Subclasses are covered too.
    """
    register(class_name(cls), layout)
