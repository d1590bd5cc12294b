"""Loading an optimizer's state dict: what is refused, and the types that its entries keep.

Torch's own loader takes any entries of any shape, and casts them to the parameter's type: counters and masters
of half-precision frames would lose their digits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .checks import check_loaded, check_settings
from .state import new_state


@contextmanager
def careful_loading(optimizer: Optimizer) -> Iterator[None]:
    """While `optimizer` loads: refuse what is not its own before anything changes, and keep the types of a new state.

    Both are done by hooks, the last before loading and the first after it, so that hooks of others see and give
    what they would with torch's optimizers.
    """
    taken: dict[str, Any] = {}  # what the hooks of others make of the state dict

    def check(_: Optimizer, state_dict: dict[str, Any]) -> None:
        _check(optimizer, state_dict)
        taken.update(state_dict)

    def keep_types(_: Optimizer) -> None:
        for p, saved, group in _saved_states(optimizer, taken):
            own = new_state(p, group)
            optimizer.state[p] = {k: torch.as_tensor(v).to(own[k].device, own[k].dtype) for k, v in saved.items()}

    hooks = (
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(keep_types, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _saved_states(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """Each parameter that `state_dict` has a state for, with that state and the parameter's group."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for p, i in zip(group["params"], saved["params"], strict=False):
            if state_dict["state"].get(i):
                yield p, state_dict["state"][i], group


def _check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"rule: an optimizer's state dict has the keys state and param_groups; found {list(state_dict)[:5]}; "
            "pass what optimizer.state_dict() gave, not the file around it or the model's weights"
        )
    for group in state_dict["param_groups"]:
        check_settings({**optimizer.defaults, **group})
    for p, saved, group in _saved_states(optimizer, state_dict):
        check_loaded(p, saved, new_state(p, group))
