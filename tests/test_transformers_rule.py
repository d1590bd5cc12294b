"""The rule by names and sizes: what it takes, and what it leaves alone and why."""

from types import SimpleNamespace

import pytest
from torch import nn

import stiefel_geo


class Attention(nn.Module):
    """Projections by name; sizes as attributes."""

    def __init__(self, projections: dict[str, int], **sizes: object) -> None:
        super().__init__()
        for name, rows in projections.items():
            self.add_module(name, nn.Linear(32, rows))
        for name, size in sizes.items():
            setattr(self, name, size)


def shapes(attention: nn.Module) -> list[tuple[int, int, int]]:
    return list(stiefel_geo.patch(attention).patched[0].shapes)


@pytest.mark.parametrize(("q", "k"), [("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("q_lin", "k_lin")])
def test_a_pair_of_names_and_a_number_of_heads_are_enough(q: str, k: str) -> None:
    assert shapes(Attention({q: 32, k: 32}, num_heads=4)) == [(4, 32, 8), (4, 32, 8)]


def test_sizes_are_read_from_the_config_where_the_module_states_none() -> None:
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert shapes(Attention({"q_proj": 64, "k_proj": 32}, config=config)) == [(4, 32, 16), (2, 32, 16)]


def test_the_module_is_believed_before_its_config() -> None:
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=8)
    assert shapes(Attention({"q_proj": 32, "k_proj": 16}, config=config, num_heads=4, num_key_value_groups=2)) == [
        (4, 32, 8),
        (2, 32, 8),
    ]


@pytest.mark.parametrize(
    ("projections", "sizes", "reason"),
    [
        ({"q_proj": 32, "k_proj": 32}, {}, "neither it nor its config states its heads"),
        ({"q_proj": 64, "k_proj": 32}, {"num_heads": 4, "head_dim": 8}, "64 rows are not q"),
        ({"q_proj": 64, "k_proj": 32}, {"num_heads": 4}, "32 rows are not k"),
        ({"q_proj": 32, "k_proj": 32, "pos_query_proj": 32}, {"num_heads": 4}, "pos_query_proj are named like"),
        ({"q_proj": 32, "kv_proj": 64}, {"num_heads": 4}, "kv_proj are named like"),
        ({"qkv": 96}, {"num_heads": 4}, "no layout is registered"),
    ],
)
def test_what_does_not_fit_is_left_alone_with_the_reason(
    projections: dict[str, int], sizes: dict[str, int], reason: str
) -> None:
    attention = Attention(projections, **sizes)
    weights = {name: p.clone() for name, p in attention.named_parameters()}
    with pytest.raises(ValueError, match=reason):
        stiefel_geo.patch(attention)
    assert all(p.equal(weights[name]) for name, p in attention.named_parameters())


def test_registered_rows_win_over_the_rule() -> None:
    class Own(Attention):
        pass

    stiefel_geo.register_attention(Own, stiefel_geo.Layout({"q_proj": "q", "k_proj": "k", "kv_x": "k v"}, "num_heads"))
    assert len(shapes(Own({"q_proj": 32, "k_proj": 32, "kv_x": 64}, num_heads=4))) == 3


def test_a_pair_of_names_outside_attention_is_not_taken_for_it_without_heads() -> None:
    with pytest.raises(ValueError, match="Nothing in this Sequential can be patched"):
        stiefel_geo.patch(nn.Sequential(nn.ModuleDict({"query": nn.Linear(8, 8), "key": nn.Linear(8, 8)})))
