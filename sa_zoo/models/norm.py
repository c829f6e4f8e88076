"""Normalization of tokens."""

from typing import Any

from torch import Tensor, nn


class BatchNorm(nn.Module):
    """(B, H, W, D) -> (B, H, W, D), over everything but D."""

    def __init__(self, dim: int, **dd: Any) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(dim, **dd)

    def forward(self, X: Tensor) -> Tensor:
        return self.bn(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
