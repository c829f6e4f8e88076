"""A convolution as multi-head self-attention with quadratic positional scores (Theorem 1), in any dimension.

    MHSA(X)_q = b_out + sum_h sum_k P_h[q, k] X_k W_val_h,    P_h[q, :] = softmax_k(-alpha_h |delta - Delta_h|^2)

Scores, softmax and mixing are the functions of models/; the layers here add a convolution's geometry. The heads of a
layer are the pixels a of a kernel, Delta_h = dilation * a - center; the queries are the pixels stride * i; the keys are
the padded image: with zero padding, a head may attend to a zero. As alpha grows, P_h becomes one-hot and the layer
becomes the convolution with its value matrices as kernel slices (Lemmas 1 and 2).

Each layer is evaluated in the cheapest way for its parameters; all are equal within certificate.py's bound:

    HardAttention     here        alpha so large that P_h is one-hot: the layer runs as its convolution
    SoftAttention     soft_attention.py     finite alpha: P_h by axes

Symbols: theorem.py. Positions are counted in keys: query i is at the key stride * i + center.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sa_zoo.convolution.padding import Padding
from sa_zoo.convolution.theorem import EXACT, head_shifts, missed_attention
from sa_zoo.convolution.values import ValueMatrices, kernel_of
from sa_zoo.models.attention import attend, probabilities_from
from sa_zoo.models.positions import at_least_float32, outer_sum, pixels, quadratic_scores

# torch's convolutions by the number of axes. Autocast handles these functions, not torch.convolution.
CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ConvolutionalAttention(nn.Module):
    """Geometry, values and the definition; subclasses choose the evaluation, and store Delta and alpha.

    Args:
        W_val: ValueMatrices.
        b_out: (D_out,) or None.
        pad: Padding or SamePadding, from images (B, D_in, *image) to keys (B, D_in, *N).
        stride, dilation: of the convolution, one item per axis.
        alpha: (N_h,), sharpness of each head.
    """

    positional_parameters = ("Delta", "alpha")
    not_decayed: tuple[str, ...] = positional_parameters
    Delta: Tensor
    alpha: Tensor

    def __init__(
        self,
        W_val: ValueMatrices,
        b_out: Tensor | None,
        pad: Padding,
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        alpha: Tensor,
    ) -> None:
        super().__init__()
        self.W_val = W_val
        self.b_out = None if b_out is None else nn.Parameter(b_out.detach())
        self.pad = pad
        self.stride = list(stride)
        self.dilation = list(dilation)
        self.center = pad.center
        self.groups = groups
        self.out_channels, inner, *self.kernel_size = W_val.weight.shape
        self.in_channels = inner * groups
        self.convolve = CONVOLVE[len(self.kernel_size)]
        self.zeros = [0] * len(self.kernel_size)
        # From the first to the last key of a kernel.
        self.extent = [
            step * (size - 1) for step, size in zip(dilation, self.kernel_size, strict=True)
        ]
        self.register_positions(
            head_shifts(self.kernel_size, dilation, self.center).to(alpha), alpha
        )

    def register_positions(self, Delta: Tensor, alpha: Tensor) -> None:
        """Register the heads' Delta (N_h, n) and alpha (N_h,): parameters, if they can be trained."""
        self.Delta = nn.Parameter(Delta)
        self.alpha = nn.Parameter(alpha)

    def missed(self) -> Tensor:
        """1 - P_h[q, target], with the targets in the order of the kernel's pixels: (N_h,), float64"""
        target = head_shifts(self.kernel_size, self.dilation, self.center)
        return missed_attention(self.Delta.detach().cpu().double() - target, self.alpha)

    @property
    def weight(self) -> Tensor:
        """The value matrices as a kernel, (D_out, D_in / groups, *K), including adapters such as LoRA."""
        if torch.jit.is_scripting():
            return self.W_val()
        return kernel_of(self.W_val)

    @property
    def bias(self) -> Tensor | None:
        return self.b_out

    def queries(self, sizes: list[int]) -> list[int]:
        """Q along each axis for N = `sizes`."""
        return [
            (sizes[axis] - self.extent[axis] - 1) // self.stride[axis] + 1
            for axis in range(len(sizes))
        ]

    def query_positions(self, axis: int, sizes: list[int]) -> Tensor:
        """Positions of queries among the keys, along one axis for N = `sizes`: (Q,)"""
        queries = pixels(self.queries(sizes)[axis], self.alpha.device)
        return queries * self.stride[axis] + self.center[axis]

    def axis_scores(self, axis: int, sizes: list[int]) -> Tensor:
        """Scores along one axis for N = `sizes`: (N_h, Q, N) (Eq. 9)"""
        keys = pixels(sizes[axis], self.alpha.device)
        return quadratic_scores(
            self.Delta[:, axis], self.alpha, self.query_positions(axis, sizes), keys
        )

    def positional_scores(self, sizes: list[int]) -> Tensor:
        """Scores of all queries and keys for N = `sizes`, pixels in row-major order: (N_h, prod Q, prod N)"""
        total = self.axis_scores(0, sizes)
        for axis in range(1, len(sizes)):
            total = outer_sum(total, self.axis_scores(axis, sizes))
        return total

    def probabilities(self, x: Tensor) -> Tensor:
        """Attention maps for images x (B, D_in, *image), pixels in row-major order, keys those of the padded image.

        (N_h, prod Q, prod N), at least float32.
        """
        return probabilities_from(self.positional_scores(list(self.pad(x).shape[2:])))

    def definition(self, x: Tensor) -> Tensor:
        """Eq. 10 as written, for maps and tests: (B, D_in, *image) -> (B, D_out, *Q)"""
        keys = self.pad(x)
        sizes = list(keys.shape[2:])
        P = probabilities_from(self.positional_scores(sizes))
        heads = attend(P, keys.flatten(2).transpose(1, 2))  # (B, prod Q, N_h D_in)
        return self.project(heads.unflatten(1, self.queries(sizes)))

    def project(self, heads: Tensor) -> Tensor:
        """b_out + sum_h heads_h W_val_h: (B, *Q, N_h D_in) -> (B, D_out, *Q)"""
        kernel = self.weight.flatten(2)  # (D_out, D_in / groups, N_h)
        by_group = kernel.unflatten(0, [self.groups, -1])
        # (B, *Q, N_h, groups, D_in / groups)
        apart = heads.unflatten(-1, [kernel.shape[2], self.groups, kernel.shape[1]])
        out = torch.einsum("b...hgi,goih->b...go", apart, by_group).flatten(-2)
        if self.b_out is not None:
            out = out + self.b_out.to(out.dtype)
        return out.movedim(-1, 1)

    def composed_kernel(self, neighborhoods: list[range]) -> Tensor:
        """sum_h P_h[q, .] W_val_h on these neighborhoods, far from the border: (D_out, D_in / groups, ..)"""
        device = self.alpha.device
        P = torch.ones_like(self.alpha)[:, None]
        for axis, neighborhood in enumerate(neighborhoods):
            offsets = pixels(len(neighborhood), device) + neighborhood[0]
            scores = quadratic_scores(self.Delta[:, axis], self.alpha, pixels(1, device), offsets)
            P = (P[:, :, None] * probabilities_from(scores)).flatten(1)
        # The values times P, as a 1x1 convolution with the heads as channels, last in memory: CPU libraries take
        # several times as long for a matrix product with so few columns.
        values = self.weight
        heads_last = at_least_float32(values).flatten(2).unsqueeze(1).permute(0, 3, 1, 2)
        kernel = F.conv2d(heads_last, P.T[:, :, None, None]).permute(0, 2, 3, 1).squeeze(1)
        return kernel.to(values.dtype).unflatten(
            -1, [len(neighborhood) for neighborhood in neighborhoods]
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, heads={self.Delta.shape[0]}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, dilation={self.dilation}, groups={self.groups}"
        )


class HardAttention(ConvolutionalAttention):
    """alpha so large that every head reads only its target: the layer is evaluated as its convolution.

    Delta and alpha are buffers: their gradients are too small for a floating-point number.
    """

    def register_positions(self, Delta: Tensor, alpha: Tensor) -> None:
        self.register_buffer("Delta", Delta)
        self.register_buffer("alpha", alpha)
        pad = self.pad
        self.outside: nn.Module = pad
        self.padding = self.zeros
        if type(pad) is Padding and pad.mode == "zeros" and pad.before == pad.after:
            self.outside = nn.Identity()
            self.padding = pad.before

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        error_msgs: list[str] = args[-1]
        missed = float(self.missed().max())
        if not missed <= EXACT:
            error_msgs.append(
                f"{prefix}alpha: got heads that miss their targets by {missed:.1e}, expected exact ones in a layer "
                "that was built for a large alpha; build it with the alpha of these weights"
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        return self.convolve(
            self.outside(x),
            self.weight,
            self.b_out,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


def convolutional(name: str, layer: nn.Module) -> ConvolutionalAttention:
    """`layer`, with its type. Raises ValueError for the argument `name` if it is another layer."""
    if not isinstance(layer, ConvolutionalAttention):
        raise ValueError(
            f"{name}: got {type(layer).__name__}, expected a result of attention_from_conv"
        )
    return layer
