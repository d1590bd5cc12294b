"""The weight that frames assemble for one use: a write to it reaches the frames, or is refused; none is lost."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOST_WRITE = (
    "A weight made from frames is assembled anew at every use, so a write into it is lost, and one was made "
    "(nn.init, copy_, .data, a loader, or an init function). Assign instead, `module.weight = tensor`; or write "
    "inside `with stiefel_geo.unpatched(model):`, which factorises what it finds afterwards; or patch last."
)
LOST_SETTING = (
    "rule: a weight made from frames is assembled anew at every use, and what is set on it goes with it; found {}; set "
    "it on the parameters that it is made of, `module.parametrizations.weight.parameters()`, or before patch(model)"
)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: object, **_kwargs: object) -> Any:
        raise RuntimeError(LOST_SETTING.format(name))

    return refuse


class AssembledWeight(Tensor):
    """A weight made from frames. Behaves as a plain tensor, but for what would be lost with it.

    `.data` shares the version counter here, so that `weight.data.mul_(…)` is noticed, and `weight.data = tensor`
    assigns `tensor` to the module.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    assign: Callable[[Tensor], None]
    before: dict[str, Tensor]  # what made it, kept while something else stands in its place (functional_call)

    data = property(lambda self: self.detach(), lambda self, value: self.assign(value.detach()))
    grad = property(lambda self: None, _refused("a gradient"))
    requires_grad = property(vars(torch._C.TensorBase)["requires_grad"].__get__, _refused("requires_grad"))
    requires_grad_ = _refused("requires_grad")
    register_hook = register_post_accumulate_grad_hook = _refused("a gradient hook")


class Watch:
    """The weight that was handed out last: its version counter without its memory, and itself while someone has it."""

    def __init__(self) -> None:
        self._counter: Tensor | None = None
        self._version = 0
        self._weight: Callable[[], AssembledWeight | None] = lambda: None

    def hand_out(self, weight: Tensor, assign: Callable[[Tensor], None]) -> Tensor:
        """`weight`, to be watched; as it is where it is not a plain tensor (fake, distributed)."""
        if type(weight) is not Tensor or weight.is_inference():
            return weight
        counter = weight.detach()  # shares the version counter
        counter.data = weight.new_empty(0)  # and no longer the memory
        self._counter, self._version = counter, counter._version
        watched = weight.as_subclass(AssembledWeight)
        watched.assign = assign
        self._weight = weakref.ref(watched)
        return watched

    def in_use(self) -> AssembledWeight | None:
        """The weight that was handed out last, if it is still held."""
        return self._weight()

    def refuse_lost_write(self) -> None:
        """Raise, once, if the weight that was handed out last was written to."""
        written = self._counter is not None and self._counter._version != self._version
        if written:
            self.forget()
            raise RuntimeError(LOST_WRITE)

    def forget(self) -> None:
        """Drop the last weight: the parameters hold another value now."""
        self._counter = None

    def __deepcopy__(self, memo: dict[int, object]) -> "Watch":
        return Watch()  # nobody holds the copy's weight yet


def watching() -> bool:
    """Whether code runs eagerly: traces and transforms must not see the bookkeeping."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None  # no torch.func.grad or its like
