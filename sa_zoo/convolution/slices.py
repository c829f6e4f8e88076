"""The value matrices of a convolutional layer: slices of its kernel. Symbols: theorem.py."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


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


class LowRankSlices(nn.Module):
    """W_h = W_val_h W_out_h (Eq. 10) as two factors of rank D_h = `head_dim`, the best ones (Eckart and Young 1936).

    weight: W_val, (N_h, D_h, D_in); W_out: (D_out, N_h, D_h). `error` is the Frobenius norm of what they lose of the
    kernel, relative to the kernel's. They lose nothing where every slice has that rank, so always for head_dim >=
    min(D_in, D_out); Lemma 1 takes D_h = D_out. The usual head_dim = D_out / N_h keeps a fraction of a trained slice.

    Args:
        kernel: (D_out, D_in / groups, *K); groups are written out as zero blocks.

    Raises ValueError for a rank that is not between 1 and D_out.
    """

    def __init__(self, kernel: Tensor, groups: int, head_dim: int) -> None:
        super().__init__()
        if not 0 < head_dim <= kernel.shape[0]:
            raise ValueError(f"head_dim: got {head_dim}, expected 1 to {kernel.shape[0]}")
        # (groups, D_out / groups, D_in / groups, N_h)
        blocks = kernel.double().flatten(2).unflatten(0, [groups, -1])
        slices = torch.stack([torch.block_diag(*head) for head in blocks.unbind(-1)])
        left, singular, right = torch.linalg.svd(slices, full_matrices=False)
        root = singular[:, :head_dim].sqrt()
        unused = head_dim - root.shape[1]  # no slice has a higher rank than D_in
        W_val = pad(root[:, :, None] * right[:, :head_dim], (0, 0, 0, unused))
        W_out = pad(left[:, :, :head_dim] * root[:, None, :], (0, unused)).transpose(0, 1)
        self.weight = nn.Parameter(W_val.to(kernel))
        self.W_out = nn.Parameter(W_out.to(kernel).contiguous())
        self.kernel_size = list(kernel.shape[2:])
        lost = singular[:, head_dim:].norm()
        self.error = float(lost / singular.norm().clamp(min=torch.finfo(lost.dtype).tiny))

    def forward(self) -> Tensor:
        """(D_out, D_in, *K)"""
        return torch.einsum("ohd,hdi->oih", self.W_out, self.weight).unflatten(-1, self.kernel_size)

    def extra_repr(self) -> str:
        return f"head_dim={self.weight.shape[1]}, error={self.error:.3g}"
