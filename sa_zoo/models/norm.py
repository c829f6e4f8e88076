"""Normalization of tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm


class BatchNorm(nn.Module):
    """(B, H, W, D) -> (B, H, W, D), over everything but D."""

    def __init__(self, dim: int, **dd: Any) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(dim, **dd)

    def forward(self, X: Tensor) -> Tensor:
        return self.bn(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that stays in the type of X under autocast: (.., D) -> (.., D)

    Statistics are in float32 either way. On a GPU, autocast would give everything up to the next product in float32.
    """

    def forward(self, X: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles both sides of `and`
            if X.dtype != self.weight.dtype and torch.is_autocast_enabled(X.device.type):
                weight, bias = self.weight.to(X.dtype), self.bias.to(X.dtype)
                with torch.autocast(X.device.type, enabled=False):
                    return layer_norm(X, self.normalized_shape, weight, bias, self.eps)
        return layer_norm(X, self.normalized_shape, self.weight, self.bias, self.eps)
