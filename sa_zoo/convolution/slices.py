"""The value matrices of a convolutional layer: slices of its kernel. Symbols: theorem.py."""

from torch import Tensor, nn


class Slices(nn.Module):
    """W_h of Eq. 10, which merges W_val_h and W_out_h (D_h = D_out), stored as a convolution stores its kernel.

    weight: (D_out, D_in / groups, *K). With groups, W_val_h is block diagonal and only its blocks are stored.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        """(D_out, D_in / groups, *K)"""
        return self.weight
