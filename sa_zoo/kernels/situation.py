"""What is known about a call at runtime: every question that decides how a layer is evaluated, asked once, and here."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from sa_zoo.models.norm import is_watched


@dataclass(frozen=True)
class Situation:
    """How and where modules are called with some tensors.

    Args:
        fixed_graph: a graph is made that has to take any batch: tracing, exporting.
        compiling: torch.compile makes a graph.
        watched: somebody expects the modules to be called.
        ordinary: the tensors are numbers in memory.
        trains: gradients may be wanted.
        on_cpu: the first tensor is on a CPU.
        autocast: operations on a CPU choose their precision.
    """

    fixed_graph: bool
    compiling: bool
    watched: bool
    ordinary: bool
    trains: bool
    on_cpu: bool
    autocast: bool

    @property
    def by_hand(self) -> bool:
        """Whether batches may be divided, and memory be reused: compilers and accelerators schedule by themselves."""
        others_decide = self.watched or self.fixed_graph or self.compiling
        return self.on_cpu and self.ordinary and not others_decide


def situation(modules: Iterable[nn.Module], *tensors: Tensor) -> Situation:
    """The situation of `modules` that are called with the first of the tensors. The others are read as well."""
    compiling = torch.compiler.is_compiling()
    return Situation(
        # In torch 2.11, is_exporting() holds in every graph being compiled; in later ones it is this flag.
        fixed_graph=torch.jit.is_tracing() or torch.compiler._is_exporting_flag,
        compiling=compiling,
        watched=any(map(is_watched, modules)),
        ordinary=compiling or is_ordinary(*tensors),
        trains=torch.is_grad_enabled(),
        on_cpu=tensors[0].is_cpu,
        autocast=torch.is_autocast_enabled("cpu"),
    )


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
