"""Batch normalization of tokens, and its place behind a linear map."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_weights

from .positions import at_least_float32


class BatchNorm(nn.Module):
    """(B, H, W, D) -> (B, H, W, D), over everything but D."""

    def __init__(self, dim: int, **dd: Any) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(dim, **dd)

    def forward(self, X: Tensor) -> Tensor:
        return self.bn(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def as_one_map(first: nn.Linear, then: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear map and of a Linear, BatchNorm or Identity after it, as one, at least float32."""
    weight = at_least_float32(first.weight.detach())
    bias = at_least_float32(first.bias.detach())
    if isinstance(then, BatchNorm):
        bn: Any = then.bn
        statistics = (bn.running_mean, bn.running_var, bn.eps)
        return fuse_linear_bn_weights(weight, bias, *statistics, bn.weight, bn.bias)
    if isinstance(then, nn.Linear):
        outer = at_least_float32(then.weight.detach())
        return outer @ weight, outer @ bias + at_least_float32(then.bias.detach())
    return weight, bias
