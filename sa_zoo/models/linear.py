"""Linear layers: whether a layer is exactly one, and the product of two."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_weights

from .norm import BatchNorm
from .positions import at_least_float32


def owns(layer: nn.Module, *names: str) -> bool:
    """Whether these are a layer's own parameters, not computed by a parametrization, a mask or a hook."""
    return all(isinstance(getattr(layer, name), nn.Parameter) for name in names)


def is_watched(module: nn.Module) -> bool:
    """Whether a module or one inside it has hooks or a replaced `forward`, and so has to be called."""
    return any(
        m._forward_pre_hooks
        or m._forward_hooks
        or m._backward_pre_hooks
        or m._backward_hooks
        or "forward" in vars(m)
        for m in module.modules()
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is exactly nn.Linear, without hooks: no adapter, parametrization or pruning."""
    return type(layer) is nn.Linear and not is_watched(layer)


def linear_map(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear layer, at least float32. Raises ValueError if it does anything else."""
    if not is_plain(layer) or not owns(layer, "weight", "bias"):
        raise ValueError(
            f"W_val, W_out: got {type(layer).__name__}, expected nn.Linear with its own weight and bias: "
            "merge adapters and remove parametrizations, pruning and hooks first"
        )
    linear: Any = layer
    return at_least_float32(linear.weight.detach()), at_least_float32(linear.bias.detach())


def as_one_map(first: nn.Module, then: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear layer and of a linear layer, BatchNorm or Identity after it, as one linear map."""
    weight, bias = linear_map(first)
    if isinstance(then, BatchNorm):
        bn: Any = then.bn
        statistics = (bn.running_mean, bn.running_var, bn.eps)
        return fuse_linear_bn_weights(weight, bias, *statistics, bn.weight, bn.bias)
    if isinstance(then, nn.Identity):
        return weight, bias
    outer, shift = linear_map(then)
    return outer @ weight, outer @ bias + shift
