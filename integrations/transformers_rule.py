"""The rule for attention classes that no table names: by the names of their projections and the sizes they state.

Read from the modeling files of transformers 5.24, where some 500 classes in some 400 folders project queries and keys
by one Linear each, under a dozen pairs of names, and state their heads on the module or on its `config`. A class of
your own, or of remote code, that does the same is found in the same way.

Nothing is guessed: a projection must have heads × width rows, or the module is left alone and the report says why.
What a name does not tell (rows of several kinds in one weight) stands in `transformers_attention`, class by class.
"""

import re

from torch import nn

from stiefel_geo.attention.layouts import Layout, LayoutError, register_rule

# Names of a query's and a key's projection, as they come in pairs.
PAIRS = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q", "k"),
    ("query_proj", "key_proj"),
    ("linear_q", "linear_k"),
    ("q_linear", "k_linear"),
    ("q_lin", "k_lin"),
    ("to_q", "to_k"),
    ("to_query", "to_key"),
    ("project_q", "project_k"),
    ("projection_query", "projection_key"),
    ("q_head", "k_head"),
    ("Wq", "Wk"),
    ("wq", "wk"),
)
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_head",
    "num_attn_heads",
    "heads",
)
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_groups")
WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_head", "dim_per_head", "head_k_dim")
ATTENTION = re.compile("att(n|ention)", re.IGNORECASE)
NAMED_SO = re.compile("(^|_)(q|k|kv|qk|qkv|query|queries|key|keys)(_|$)")
Stated = tuple[str, int] | None


def rule(module: nn.Module) -> Layout | None:
    """The layout of a module by the names of its projections; None if they are not a query's and a key's."""
    for names in PAIRS:
        found = {name: role for name, role in zip(names, "qk", strict=True) if _child(module, name) is not None}
        if len(found) == 2 or (found and ATTENTION.search(type(module).__name__)):
            return _layout(module, found)
    return None


def _layout(module: nn.Module, found: dict[str, str]) -> Layout:
    others = [name for name, child in module.named_children() if NAMED_SO.search(name) and _outputs(child)]
    if unknown := ", ".join(name for name in others if name not in found):
        return Layout(skip=f"its projections {unknown} are named like queries or keys too; see register_attention")
    rows = {_path(name, _child(module, name)): role for name, role in found.items()}
    return Layout(rows, heads, kv_heads=key_heads, width=width)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    return module._modules.get(name)


def _path(name: str, projection: nn.Module | None) -> str:
    """The projection, or the Linear inside it where a class wraps one, as Gemma 4's clippable Linear does."""
    return f"{name}.linear" if isinstance(getattr(projection, "linear", None), nn.Module) else name


def _outputs(projection: nn.Module) -> int:
    """Its output features, without assembling a weight that frames carry; 0 for anything but a projection."""
    inner = getattr(projection, "linear", projection)
    return next((int(n) for name in ("out_features", "out_channels") if (n := getattr(inner, name, 0))), 0)


def _stated(holder: object, names: tuple[str, ...]) -> Stated:
    """The first of these sizes that a module or config states."""
    sizes = ((name, getattr(holder, name, None)) for name in names)
    return next(((name, size) for name, size in sizes if isinstance(size, int) and size > 0), None)


def _either(module: nn.Module, names: tuple[str, ...]) -> Stated:
    """What the module states, or else its config."""
    return _stated(module, names) or _stated(getattr(module, "config", None), names)


def heads(module: nn.Module) -> int:
    """As stated, or else as many of the stated width as the query's rows hold."""
    if (found := _either(module, HEADS)) is not None:
        return found[1]
    if (found := _either(module, WIDTHS)) is not None:
        return _rows(module, 0) // found[1]
    raise LayoutError(f"neither it nor its config states its heads ({', '.join(HEADS)})")


def key_heads(module: nn.Module) -> int:
    """As stated; as many as query heads where nothing is."""
    name, number = _either(module, KEY_HEADS) or ("", heads(module))
    return heads(module) // number if name == "num_key_value_groups" else number


def width(module: nn.Module) -> int:
    """Rows of one head: as stated, or else the query's rows in equal parts, with which the key's must agree."""
    if (found := _either(module, WIDTHS)) is not None:
        return found[1]
    return _rows(module, 0) // heads(module) if _rows(module, 0) else _rows(module, 1) // key_heads(module)


def _rows(module: nn.Module, which: int) -> int:
    """Rows of the query's (0) or the key's (1) projection, 0 where it has none of a known name."""
    children = (_child(module, names[which]) for names in PAIRS)
    return next((_outputs(child) for child in children if child is not None), 0)


register_rule(rule)
