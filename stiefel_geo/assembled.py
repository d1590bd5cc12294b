"""The weight that frames assemble for one use, and how a write into it is noticed instead of lost."""

import torch
from torch import Tensor

LOST_WRITE = (
    "A weight made from frames is assembled anew at every use, so a write into it is lost, and one was made "
    "(nn.init, copy_, .data, a loader, or an init function). Assign instead, `module.weight = tensor`; or write "
    "inside `with stiefel_geo.patching.unpatched(model):`, which factorises what it finds afterwards; or patch last."
)


class AssembledWeight(Tensor):
    """A weight made from frames. Behaves as a plain tensor; a write to it is noticed.

    `.data` shares the version counter here, and assigning it is refused: `weight.data.mul_(…)` and
    `weight.data = …` on a parametrized weight would otherwise be lost without a word.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(LOST_WRITE)


class Watch:
    """The version counter of the weight that was handed out last, without its memory."""

    def __init__(self) -> None:
        self._counter: Tensor | None = None
        self._version = 0

    def hand_out(self, weight: Tensor) -> Tensor:
        """`weight`, to be watched; as it is where it is not a plain tensor (fake, distributed) or is being traced."""
        if type(weight) is not Tensor:
            return weight
        counter = weight.detach()  # shares the version counter
        counter.data = weight.new_empty(0)  # and no longer the memory
        self._counter, self._version = counter, counter._version
        return weight.as_subclass(AssembledWeight)

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
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # torch.func.grad and its like
    return not (transformed or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None)
