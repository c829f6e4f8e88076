"""What is known about a call at runtime: every question that decides how a layer is evaluated, asked once, and here."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from sa_zoo.models.norm import is_watched


def makes_graph() -> bool:
    """Whether a graph is made of what is called: by tracing, exporting or torch.compile."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


class Situation:
    """How and where `modules` are called with the first of `tensors`; the others are read as well.

    Each question is asked when its answer is needed: small layers take less time than all of them.
    """

    def __init__(self, modules: Iterable[nn.Module], *tensors: Tensor) -> None:
        self.modules = list(modules)
        self.tensors = tensors

    @property
    def fixed_graph(self) -> bool:
        """A graph is made that has to take any batch: tracing, exporting."""
        # In torch 2.11, is_exporting() holds in every graph being compiled; in later ones it is this flag.
        return torch.jit.is_tracing() or torch.compiler._is_exporting_flag

    @property
    def compiling(self) -> bool:
        """torch.compile makes a graph."""
        return torch.compiler.is_compiling()

    @property
    def watched(self) -> bool:
        """Somebody expects the modules to be called."""
        return any(map(is_watched, self.modules))

    @property
    def ordinary(self) -> bool:
        """The tensors are numbers in memory."""
        return self.compiling or is_ordinary(*self.tensors)

    @property
    def trains(self) -> bool:
        """Gradients may be wanted."""
        return torch.is_grad_enabled()

    @property
    def by_hand(self) -> bool:
        """Whether batches may be divided, and memory be reused: compilers and accelerators schedule by themselves."""
        return self.tensors[0].is_cpu and not makes_graph() and not self.watched and self.ordinary


def is_ordinary(*tensors: Tensor) -> bool:
    """Whether tensors are numbers in memory: no stand-ins of torch.func's transforms, subclasses or dual numbers."""
    try:
        for tensor in tensors:
            tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return all(
        type(tensor) in (Tensor, nn.Parameter) and unpack_dual(tensor).tangent is None
        for tensor in tensors
    )
