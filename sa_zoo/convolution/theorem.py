"""The formulas of Theorem 1: which heads express a convolution, and how sharp they have to be.

Symbols as in models/attention.py; in addition K, the kernel size, Q and N, the numbers of queries and of keys along one
axis, and n, the number of axes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Off-target attention below this changes no sum, in any floating-point type.
EXACT = torch.finfo(torch.float64).eps / 2
# Attention less sharp than this is treated as uniform: sums over its neighborhood would not end.
DULLEST = 1e-4


def head_shifts(
    kernel_size: Sequence[int], dilation: Sequence[int], center: Sequence[int]
) -> Tensor:
    """Delta_h = dilation * a - center for every kernel pixel a in row-major order: (N_h, n), float32, on the CPU."""
    axes = [
        torch.arange(-middle, step * (K - 1) - middle + 1, step, device="cpu", dtype=torch.float32)
        for K, step, middle in zip(kernel_size, dilation, center, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def seen_offsets(Delta: Tensor, alpha: Tensor, precision: float) -> list[tuple[int, int]]:
    """First and last key that each head sees along one axis, as displacements from the query: N_h pairs.

    A head sees a key if its probability, relative to that of the key nearest to Delta_h, is above `precision`.
    """
    Delta, alpha = Delta.detach().cpu().double(), alpha.detach().cpu().double().clamp(DULLEST, 1e30)
    radius = ((Delta - Delta.round()).square() - math.log(precision) / alpha).sqrt()
    first, last = (Delta - radius).ceil().int().tolist(), (Delta + radius).floor().int().tolist()
    return list(zip(first, last, strict=True))


def window(seen: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(first, step, count) of the smallest lattice of displacements that contains all that is seen."""
    offsets = {offset for first, last in seen for offset in range(first, last + 1)}
    first, last = min(offsets), max(offsets)
    step = math.gcd(*(offset - first for offset in offsets)) or 1
    return first, step, (last - first) // step + 1


def missed_attention(offset: Tensor, alpha: Tensor) -> Tensor:
    """1 - P_h[q, target]: what a head gives to keys other than its target, on an unbounded grid (less at borders).

    P_h[q, target] = prod_axes 1 / (1 + sum_{t != 0} exp(-alpha (t^2 - 2 t f))), f the offset from target to Delta_h.

    offset (N_h, n), Delta_h minus the displacement of the target, in pixels, and alpha (N_h,) -> (N_h,), float64
    """
    offset, alpha = offset.detach().cpu().double(), alpha.detach().cpu().double()
    sharp = alpha.clamp(DULLEST, 1e30)
    reach = math.ceil(
        (-math.log(torch.finfo(torch.float64).tiny) / float(sharp.min())) ** 0.5
        + offset.abs().max()
    )
    t = torch.arange(-reach, reach + 1, device="cpu", dtype=torch.float64)
    t = t[t != 0]
    exponents = -sharp[:, None, None] * (
        t.square() - 2 * t * offset[:, :, None]
    )  # (N_h, n, keys but the target)
    missed = -torch.expm1(-torch.log1p(exponents.exp().sum(dim=-1)).sum(dim=-1))
    return torch.where(alpha < DULLEST, 1.0, missed)


def exact_heads(heads: int, alpha: float, axes: int) -> tuple[Tensor, Tensor]:
    """offset (N_h, n) and alpha (N_h,) of heads centered on their targets, float64, on the CPU."""
    offset = torch.zeros(heads, axes, device="cpu", dtype=torch.float64)
    return offset, torch.full((heads,), alpha, device="cpu", dtype=torch.float64)


def is_exact(offset: Tensor, alpha: Tensor) -> bool:
    """Whether no head misses its target by more than float64 can represent. Arguments as `missed_attention`'s."""
    return bool((missed_attention(offset, alpha) <= EXACT).all())
