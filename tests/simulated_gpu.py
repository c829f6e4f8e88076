"""A GPU that does not exist: tensors that say they are on it, and whose numbers are computed on the CPU.

As on a GPU, tensors of two devices do not mix. Where asked, an error is raised where the host would wait for the
device: where it reads numbers or counts elements, and at copies that are not asynchronous. torch's FakeTensorMode
has no backward pass here: autograd asks for streams of the driver that a build for CUDA lacks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.__future__ import set_overwrite_module_params_on_conversion
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
READING = {Tensor.cpu, Tensor.numpy, Tensor.tolist}
FROM_THE_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
COUNTING = {aten._local_scalar_dense, aten.equal, aten.masked_select, aten.nonzero, aten._unique2}
_forbidden: list[bool] = []


class Waiting(Exception):
    """The host would wait for the device."""


@contextmanager
def never_waiting() -> Iterator[None]:
    _forbidden.append(True)
    try:
        yield
    finally:
        _forbidden.pop()


def wait(what: Any) -> None:
    if _forbidden:
        raise Waiting(f"{what} waits for the device")


class OnGPU(Tensor):
    """A tensor of the simulated GPU, which holds one of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnGPU":
        tensor = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), None, held.dtype
        )
        tensor.held = held
        return tensor

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in COUNTING or _by_mask(func, args):
            wait(func)
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor) and not isinstance(tensor, OnGPU) and tensor.dim():
                raise RuntimeError(f"{func}: got a tensor {tuple(tensor.shape)} of another device")
        held_args, held_kwargs = tree_map_only(OnGPU, lambda tensor: tensor.held, (args, kwargs))
        result = tree_map_only(Tensor, OnGPU, func(*held_args, **held_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, result)


def _by_mask(func: Any, args: Any) -> bool:
    """Whether elements are selected by a mask, whose elements have to be counted."""
    if func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def on_gpu(value: Any) -> bool:
    if isinstance(value, torch.device | str):
        return torch.device(value).type == "cuda"
    return isinstance(value, OnGPU)


def without_gpu(value: Any) -> Any:
    """The tensor or device of the CPU that stands for it."""
    if not on_gpu(value):
        return value
    return value.held.detach() if isinstance(value, OnGPU) else CPU


class SimulatedGPU(TorchFunctionMode):
    """Within it, the device "cuda" is the simulated one."""

    def __enter__(self) -> Any:
        # Module.to makes new parameters, as those of the CPU cannot change their type
        set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        set_overwrite_module_params_on_conversion(False)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.to:
            return self.to(*args, **kwargs)
        if func in READING and on_gpu(args[0]):
            wait(func)
            return func(*tree_map(without_gpu, args))
        if not on_gpu(kwargs.get("device")):
            return func(*args, **kwargs)
        if func is torch.as_tensor and on_gpu(args[0]):
            return args[0]
        if func in FROM_THE_HOST:
            wait(func)
        return OnGPU(func(*args, **kwargs | {"device": CPU}))

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        places = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.device | str | Tensor)
        ]
        if not places or on_gpu(places[0]) == on_gpu(tensor):
            args, kwargs = tree_map_only(torch.device | str, without_gpu, (args, kwargs))
            return Tensor.to(tensor, *args, **kwargs)
        if not kwargs.get("non_blocking"):
            wait("Tensor.to")
        there, args, kwargs = tree_map(without_gpu, (tensor, args, kwargs))
        moved = Tensor.to(there, *args, **kwargs)
        return OnGPU(moved) if on_gpu(places[0]) else moved
