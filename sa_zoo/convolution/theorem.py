"""The formulas of Theorem 1: the heads that express a convolution, and their sharpness.

Symbols as in models/attention.py; in addition K, the kernel size, Q and N, the numbers of queries and of keys along one
axis, and n, the number of axes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Off-target attention below this changes no sum, in any floating-point type.
EXACT = torch.finfo(torch.float64).eps / 2
# Attention less sharp than this is treated as uniform: its neighborhood would be unbounded.
LEAST_ALPHA = 1e-4
# At this offset from its target, a head of any other sharpness misses it entirely in float64: 1 - P rounds to 1.
LARGEST_OFFSET = 1e3
LARGEST_SPREAD = 1e15  # infinite ones have no matrix


def head_shifts(
    kernel_size: Sequence[int], dilation: Sequence[int], center: Sequence[int]
) -> Tensor:
    """Delta_h = dilation * a - center for every kernel pixel a in row-major order: (N_h, n), float32, on the CPU."""
    axes = [
        torch.arange(-middle, step * (K - 1) - middle + 1, step, device="cpu", dtype=torch.float32)
        for K, step, middle in zip(kernel_size, dilation, center, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def spread_matrices(spread: Tensor, n: int = 2) -> Tensor:
    """S of Gaussian heads with inverse covariances S S^T: (N_h,) or (N_h, n, n) -> (N_h, n, n)"""
    if spread.ndim == 3:
        return spread
    return spread.clamp(-LARGEST_SPREAD, LARGEST_SPREAD)[:, None, None] * torch.eye(n)


def support_of(Delta: float, alpha: float, precision: float) -> tuple[int, int]:
    """The first and last key in a head's support along one axis, as displacements from the query.

    In the support, probabilities are above `precision` times that of the key nearest to Delta.
    """
    nearest = round(Delta)
    radius = math.sqrt((Delta - nearest) ** 2 - math.log(precision) / alpha)
    first = math.ceil(Delta - radius)
    last = math.floor(Delta + radius)
    return min(first, nearest), max(last, nearest)


def neighborhoods(Delta: Tensor, alpha: Tensor, precision: float) -> list[range]:
    """The keys in any head's support, along each axis: (N_h, n), (N_h,) -> n neighborhoods.

    Empty if a head has unbounded support.

    Reads the values of Delta and alpha: a CPU has to wait for an accelerator.
    """
    sharpness = alpha.tolist()
    axes = Delta.T.tolist()
    unbounded = not all(value >= LEAST_ALPHA for value in sharpness)  # true for NaN too
    if unbounded or not math.isfinite(sum(map(sum, axes))):
        return []
    found = []
    for axis in axes:
        ends = [support_of(*head, precision) for head in zip(axis, sharpness, strict=True)]
        found.append(range(min(first for first, _ in ends), max(last for _, last in ends) + 1))
    return found


def neighborhoods_with(targets: Tensor, Delta: Tensor, alpha: Tensor) -> list[range]:
    """The neighborhoods of heads (in float64) and of targets (N_h, n), as heads of infinite sharpness."""
    sharp = torch.full_like(alpha, torch.inf)
    precision = torch.finfo(torch.float64).eps
    return neighborhoods(torch.cat([Delta, targets]), torch.cat([alpha, sharp]), precision)


def missed_attention(offset: Tensor, alpha: Tensor) -> Tensor:
    """1 - P_h[q, target]: attention to keys other than a head's target, on an unbounded grid (less at borders).

    P_h[q, target] = prod_axes 1 / (1 + sum_{t != 0} exp(-alpha (t^2 - 2 t f))), f the offset from target to Delta_h.

    offset (N_h, n), Delta_h minus the displacement of the target, in pixels, and alpha (N_h,) -> (N_h,), float64
    """
    offset = offset.detach().cpu().double().clamp(-LARGEST_OFFSET, LARGEST_OFFSET)
    alpha = alpha.detach().cpu().double()
    sharp = alpha.clamp(LEAST_ALPHA, 1e30)
    vanishing = -math.log(torch.finfo(torch.float64).tiny)
    reach = math.sqrt(vanishing / float(sharp.nan_to_num(LEAST_ALPHA).min()))
    reach = math.ceil(reach + float(offset.nan_to_num().abs().max()))
    t = torch.arange(-reach, reach + 1, device="cpu", dtype=torch.float64)
    t = t[t != 0]
    # (N_h, n, keys but the target)
    exponents = -sharp[:, None, None] * (t.square() - 2 * t * offset[:, :, None])
    missed = -torch.expm1(-torch.log1p(exponents.exp().sum(dim=-1)).sum(dim=-1))
    return torch.where(alpha < LEAST_ALPHA, 1.0, missed)


def limit_of_attention(centers: Tensor, keys: Tensor) -> Tensor:
    """softmax_k(-alpha |key_k - center_q|^2) as alpha tends to infinity: (Q, n), (N, n) -> (Q, N)

    1 for the key nearest to the center, or equal parts for equally near ones. With center_q = q + Delta_h, a head at an
    integer Delta reads the pixel q + Delta or, outside the image, the nearest pixel of the border (replicate padding).
    A head half-way between two pixels reads the mean of both.
    """
    distance = (keys[None, :, :] - centers[:, None, :]).square().sum(dim=-1)
    nearest = (distance == distance.amin(dim=1, keepdim=True)).to(centers)
    return nearest / nearest.sum(dim=1, keepdim=True)
