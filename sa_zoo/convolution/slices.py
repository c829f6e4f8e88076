"""The value matrices of a convolutional layer: slices of its kernel. Symbols: theorem.py."""

from torch import Tensor, nn


class Slices(nn.Module):
    """W_h = W_val_h W_out_h of Eq. 10 (D_h = D_out), stored like the kernel of a convolution.

    weight: (D_out, D_in / groups, *K). With groups, W_val_h is block diagonal and only its blocks are stored.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        """(D_out, D_in / groups, *K)"""
        return self.weight
