"""A convolution as multi-head self-attention with quadratic positional scores (Theorem 1), in 1, 2 or 3 dimensions.

    MHSA(X)_q = b_out + sum_h sum_k P_h[q, k] X_k W_val_h,    P_h[q, :] = softmax_k(-alpha_h |delta - Delta_h|^2)

The heads of a layer are the pixels a of a kernel, Delta_h = dilation * a - centre; the queries are the pixels
stride * i; the keys are the padded image, so that with zero padding a head may look at a zero. As alpha grows, P_h
becomes one-hot and the layer becomes the convolution whose kernel slices are its value matrices (Lemmas 1 and 2 with
D_h = D_out, W_out merged into W_val).

One layer, evaluated in the cheapest way that its parameters allow; all are equal within certificate.py:

    HardAttention     here        alpha beyond exactness: P_h is one-hot, and the layer runs as its convolution
    SoftAttention     soft.py     finite alpha: one composed kernel, or P_h by axes, whichever is cheaper
    ContentAttention  content.py  scores that look at pixels too: explicit softmax

Symbols as in attention.py, and: n the number of axes, K the kernel size, Q and N the queries and keys along an axis.
Positions are counted in keys: the query i stands on the key stride * i + centre.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .positions import wide

# exp(-alpha) is zero in float64 long before; finite, because infinity times a distance of zero has no value.
SHARPEST = 1e30
# Off-target attention below this changes no sum, in any floating type.
EXACT = torch.finfo(torch.float64).eps / 2
# Attention this dull is taken for uniform: sums over its neighbourhood would never end.
DULLEST = 1e-4


def head_shifts(kernel_size: Sequence[int], dilation: Sequence[int], centre: Sequence[int]) -> Tensor:
    """Delta_h = dilation * a - centre for every kernel pixel a in row-major order: (N_h, n), float32 (Theorem 1)."""
    axes = [torch.arange(size) * step - middle for size, step, middle in zip(kernel_size, dilation, centre, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2).float()


def missed_attention(offset: Tensor, alpha: Tensor) -> Tensor:
    """1 - P_h[q, target]: what a head gives to keys other than its target, on an unbounded grid (borders have less).

    prod_axes 1 / (1 + sum_{t != 0} exp(-alpha (t^2 - 2 t f))) is P_h[q, target], f the offset of Delta_h from it.

    Args:
        offset: (N_h, n), Delta_h minus the displacement of the target, in pixels.
        alpha: (N_h,).

    Returns:
        (N_h,), float64.
    """
    offset, alpha = offset.detach().cpu().double(), alpha.detach().cpu().double()
    sharp = alpha.clamp(DULLEST, SHARPEST)
    reach = math.ceil((-math.log(torch.finfo(torch.float64).tiny) / float(sharp.min())) ** 0.5 + offset.abs().max())
    t = torch.cat([torch.arange(-reach, 0), torch.arange(1, reach + 1)]).double()
    exponents = -sharp[:, None, None] * (t.square() - 2 * t * offset[:, :, None])  # (N_h, n, keys but the target)
    missed = -torch.expm1(-torch.log1p(exponents.exp().sum(dim=-1)).sum(dim=-1))
    return torch.where(alpha < DULLEST, 1.0, missed)


def is_exact(offset: Tensor, alpha: Tensor) -> bool:
    """Whether no head misses its target by more than any floating type can see. Arguments as `missed_attention`'s."""
    return bool((missed_attention(offset, alpha) <= EXACT).all())


def axis_scores(Delta: Tensor, alpha: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """-alpha_h (delta - Delta_h)^2 along one axis, delta = k - q: (N_h,), (N_h,), (Q,), (N,) -> (N_h, Q, N) (Eq. 9)"""
    distance = keys[None, None, :] - queries[None, :, None] - wide(Delta)[:, None, None]
    return -wide(alpha).clamp(max=SHARPEST)[:, None, None] * distance.square()


def attend_by_axes(P: list[Tensor], X: Tensor, first: int) -> Tensor:
    """P_h X with P_h = prod_axes P[axis]: n of (N_h, Q, N), and (B, D_in, *N) -> (B, D_in, N_h, *Q)

    The axes are contracted in turn, `first` before all others: best the one that leaves the fewest queries.
    """
    heads = X.unsqueeze(2)
    for turn in range(len(P)):
        axis = (first + turn) % len(P)
        heads = heads.movedim(3 + axis, -1)
        heads = torch.einsum("hqk,bch...k->bch...q", P[axis].to(X.dtype), heads).movedim(-1, 3 + axis)
    return heads


def mix_heads(heads: Tensor, slices: Tensor, b_out: Tensor | None, groups: int) -> Tensor:
    """b_out + sum_h heads_h W_val_h: (B, D_in, N_h, *Q), (D_out, D_in / groups, N_h), (D_out,) -> (B, D_out, *Q)"""
    ones, none = [1] * (heads.ndim - 3), [0] * (heads.ndim - 3)
    kernel = slices.flatten(1).unflatten(1, [-1] + ones)
    return torch.convolution(heads.flatten(1, 2), kernel, b_out, ones, none, ones, False, none, groups)


class Slices(nn.Module):
    """Value matrices W_val_h, stored as a convolution stores its kernel: weight (D_out, D_in / groups, *K).

    With groups, W_val_h is block diagonal and only its blocks are stored.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        """(D_out, D_in / groups, *K)"""
        return self.weight


class LowRankSlices(nn.Module):
    """W_val_h W_out_h with D_h < D_out channels between them (Eq. 3): weight (N_h, D_h, D_in), W_out (D_out, N_h, D_h)"""

    def __init__(self, weight: Tensor, W_out: Tensor, kernel_size: Sequence[int], error: float) -> None:
        super().__init__()
        self.error = error  # relative, of the kernel that these are the best matrices for
        self.weight = nn.Parameter(weight)
        self.W_out = nn.Parameter(W_out)
        self.kernel_size = list(kernel_size)

    def forward(self) -> Tensor:
        """(D_out, D_in, *K)"""
        return torch.einsum("ohd,hdi->oih", self.W_out, self.weight).unflatten(-1, self.kernel_size)


class Padding(nn.Module):
    """The keys: an image padded by fixed amounts, (before, after) an axis, in one of nn.Conv's padding modes."""

    def __init__(self, amounts: Sequence[tuple[int, int]], mode: str) -> None:
        super().__init__()
        self.before = [before for before, _ in amounts]
        self.after = [after for _, after in amounts]
        self.fixed = [amount for pair in reversed(amounts) for amount in pair]
        self.mode = "constant" if mode == "zeros" else mode

    def amounts(self, image: list[int]) -> list[int]:
        """Padding of an image of this size in F.pad's order: before and after the last axis, then the one before it."""
        return self.fixed

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_in, *N)"""
        return F.pad(x, self.fixed, self.mode)


class SamePadding(nn.Module):
    """The keys: an image padded with zeros so that ceil(size / stride) queries fit, as TensorFlow's 'SAME' does."""

    def __init__(self, extent: Sequence[int], stride: Sequence[int]) -> None:
        super().__init__()
        self.extent = list(extent)
        self.stride = list(stride)
        self.mode = "constant"

    def amounts(self, image: list[int]) -> list[int]:
        """Padding of an image of this size in F.pad's order: before and after the last axis, then the one before it."""
        amounts: list[int] = []
        for axis in range(len(image) - 1, -1, -1):
            last = (image[axis] - 1) // self.stride[axis] * self.stride[axis]  # where the last query's window starts
            missing = max(last + self.extent[axis] + 1 - image[axis], 0)
            amounts += [missing // 2, missing - missing // 2]
        return amounts

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_in, *N)"""
        return F.pad(x, self.amounts(list(x.shape[2:])))


class ConvolutionalAttention(nn.Module):
    """Geometry, values and explicit evaluation. What forward does, and how Delta and alpha are held: the subclasses.

    Args:
        W_val: module without input that returns the value matrices (D_out, D_in / groups, *K).
        b_out: (D_out,) or None.
        pad: Padding or SamePadding, from images (B, D_in, *image) to keys (B, D_in, *N).
        centre: key that the first query stands on, an axis.
        alpha: (N_h,), sharpness of each head.
    """

    def __init__(
        self,
        W_val: nn.Module,
        b_out: Tensor | None,
        pad: nn.Module,
        stride: Sequence[int],
        dilation: Sequence[int],
        centre: Sequence[int],
        groups: int,
        alpha: Tensor,
    ) -> None:
        super().__init__()
        self.W_val = W_val
        self.b_out = None if b_out is None else nn.Parameter(b_out)
        self.pad = pad
        self.stride, self.dilation, self.centre, self.groups = list(stride), list(dilation), list(centre), groups
        self.out_channels, inner, *kernel_size = W_val().shape
        self.in_channels = inner * groups
        self.kernel_size = kernel_size
        self.extent = [step * (size - 1) for step, size in zip(dilation, kernel_size, strict=True)]  # last key of a window
        self.zeros = [0] * len(kernel_size)
        self.hold(head_shifts(kernel_size, dilation, centre).to(alpha), alpha)

    @torch.jit.ignore
    def hold(self, Delta: Tensor, alpha: Tensor) -> None:
        """Keep the heads' Delta (N_h, n) and alpha (N_h,) as what they are to this evaluation."""
        raise NotImplementedError

    def queries(self, keys: list[int]) -> list[int]:
        """How many queries there are along each axis with so many keys."""
        return [
            (size - extent - 1) // stride + 1
            for size, extent, stride in zip(keys, self.extent, self.stride, strict=True)
        ]

    def axis_scores(self, axis: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores of queries and keys by their numbers along one axis: (Q,), (N,) -> (N_h, Q, N)"""
        standing = (queries * self.stride[axis] + self.centre[axis]).to(wide(self.alpha).dtype)
        return axis_scores(self.Delta[:, axis], self.alpha, standing, keys.to(standing.dtype))

    def positional_scores(self, keys: Tensor) -> Tensor:
        """Scores of all queries and the keys (B, D_in, *N), pixels in row-major order: (N_h, prod Q, prod N)."""
        total = torch.zeros(1, 1, 1, device=keys.device)
        sizes = list(keys.shape[2:])
        for axis, count in enumerate(self.queries(sizes)):
            queries, numbers = torch.arange(count, device=keys.device), torch.arange(sizes[axis], device=keys.device)
            added = self.axis_scores(axis, queries, numbers)
            total = (total[:, :, None, :, None] + added[:, None, :, None, :]).flatten(3, 4).flatten(1, 2)
        return total

    def scores(self, keys: Tensor) -> Tensor:
        """What the softmax is taken of: here, `positional_scores`."""
        return self.positional_scores(keys)

    def probabilities(self, x: Tensor) -> Tensor:
        """Attention maps for images x (B, D_in, *image), pixels in row-major order, keys those of the padded image.

        Returns:
            (N_h, prod Q, prod N), float32 or wider; (B, N_h, prod Q, prod N) where scores look at pixels.
        """
        return torch.softmax(self.scores(self.pad(x)), dim=-1)

    def explicit(self, x: Tensor) -> Tensor:
        """The layer by its definition, softmax and all: for maps, tests and content. (B, D_in, *image) -> (B, D_out, *Q)"""
        keys = self.pad(x)
        P = torch.softmax(self.scores(keys), dim=-1).to(keys.dtype)
        heads = torch.einsum("...hqk,...ck->...chq", P, keys.flatten(2))  # (B, D_in, N_h, prod Q)
        return self.mix(heads.unflatten(-1, self.queries(list(keys.shape[2:]))))

    def mix(self, heads: Tensor) -> Tensor:
        """b_out + sum_h P_h X W_val_h from P_h X: (B, D_in, N_h, *Q) -> (B, D_out, *Q)"""
        return mix_heads(heads, self.W_val().flatten(2), self.b_out, self.groups)

    @torch.jit.ignore
    def key_sizes(self, image: list[int]) -> list[int]:
        """N of an image of this size."""
        amounts = self.pad.amounts(image)
        return [size + sum(ends) for size, *ends in zip(image, amounts[-2::-2], amounts[::-2], strict=True)]

    @torch.jit.ignore
    def macs(self, image: list[int]) -> int:
        """Multiply-adds of forward for one image of this size."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, heads={self.Delta.shape[0]}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, dilation={self.dilation}, groups={self.groups}"
        )


class HardAttention(ConvolutionalAttention):
    """alpha so large that every head sees its target alone: evaluated as the convolution that the layer then is.

    Delta and alpha are buffers: they have no gradient here, of which a floating number could tell.
    """

    @torch.jit.ignore
    def hold(self, Delta: Tensor, alpha: Tensor) -> None:
        self.register_buffer("Delta", Delta)
        self.register_buffer("alpha", alpha)
        pad = self.pad
        native = isinstance(pad, Padding) and pad.mode == "constant" and pad.before == pad.after
        self.outside = nn.Identity() if native else pad
        self.padding = pad.before if native else self.zeros

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        alpha, Delta = state_dict.get(prefix + "alpha", self.alpha), state_dict.get(prefix + "Delta", self.Delta)
        offset = Delta.cpu() - head_shifts(self.kernel_size, self.dilation, self.centre)
        if not is_exact(offset, alpha):
            error_msgs.append(
                f"{prefix}alpha: got attention that misses its target by "
                f"{float(missed_attention(offset, alpha).max()):.1e}, expected none, as this layer was built for a "
                f"larger alpha; build it with the alpha that the weights were made with"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @torch.jit.ignore
    def macs(self, image: list[int]) -> int:
        return math.prod(self.queries(self.key_sizes(image))) * math.prod(self.kernel_size) * (
            self.in_channels // self.groups * self.out_channels
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        return torch.convolution(
            self.outside(x),
            self.W_val(),
            self.b_out,
            self.stride,
            self.padding,
            self.dilation,
            False,
            self.zeros,
            self.groups,
        )
