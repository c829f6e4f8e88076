"""The runtime state that decides how a layer is evaluated."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from sa_zoo.models.norm import is_watched


def makes_graph() -> bool:
    """Whether calls are recorded in a graph, by tracing, exporting or torch.compile."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


class Situation:
    """The state of a call of `modules` with the images X.

    Each property is evaluated on demand: all of them take more time than a small layer.
    """

    def __init__(self, modules: Iterable[nn.Module], X: Tensor) -> None:
        self.modules = list(modules)
        self.X = X
        self._taps: list[list[int]] | None = None

    def taps_of(self, term: Any) -> list[list[int]]:
        """`term.taps()` of the layer's only term, read once per call: on a GPU, the CPU waits for it."""
        if self._taps is None:
            self._taps = term.taps()
        return self._taps

    @property
    def tensors(self) -> list[Tensor]:
        """What the call reads: X and parameters."""
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        return [self.X, *parameters]

    @property
    def fixed_graph(self) -> bool:
        """Whether tracing or exporting makes a graph for any batch."""
        # In torch 2.11, is_exporting() holds in every graph being compiled; in later ones it is this flag.
        return torch.jit.is_tracing() or torch.compiler._is_exporting_flag

    @property
    def compiling(self) -> bool:
        """Whether torch.compile makes a graph."""
        return torch.compiler.is_compiling()

    @property
    def watched(self) -> bool:
        """Whether the modules have to be called: `is_watched`."""
        return any(map(is_watched, self.modules))

    @property
    def ordinary(self) -> bool:
        """Whether the tensors are numbers in memory."""
        return self.compiling or is_ordinary(*self.tensors)

    @property
    def trains(self) -> bool:
        """Whether gradients may be needed."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    @property
    def by_hand(self) -> bool:
        """Whether batches may be divided and memory reused: compilers and accelerators schedule by themselves."""
        return self.X.is_cpu and self.as_written

    @property
    def as_written(self) -> bool:
        """Whether the call does what the code says, on numbers in memory, without a graph or a hook."""
        return not makes_graph() and not self.watched and self.ordinary


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
