"""The convolution nearest to a layer of a network, and its distance. Symbols: models/attention.py; K, c below.

The layer's heads may attend to anything. Layers made of convolutions go back by layer_conversion.py.

The attention maps of a head are compared with those of one value matrix per kernel pixel,

    C_h[q, k] = sum_a c_h[a] [k = q + a, moved to the border where it is outside],    a in a K x K window around q.

The layer b + sum_h P_h X W_h is compared with the convolution of kernel slices sum_h c_h[a] W_h and replicate padding:
one-hot heads without padding equal it exactly (theorem.py). As in certificate.py, for |x| <= M,

    |MHSA(x) - Conv(x)|_o <= M max_q sum_h d_h[q] |W_h[:, o]|_1,    d_h[q] = sum_k |P_h[q, k] - C_h[q, k]|

and d_h[q] = 2 (1 - P_h[q, target]) for the one-hot c_h of Theorem 1.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sa_zoo.convolution.layer_conversion import conv_of
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import as_one_map


def coefficients(P: Tensor, grid: tuple[int, int], K: int) -> Tensor:
    """c_h[a], the mean of P_h[q, q + a] over all queries whose window lies in the image: (N_h, T, T) -> (N_h, K, K)

    For maps that depend on displacements only, it minimizes the sums of absolute values above.
    Raises ValueError for an even window, or one larger than the image.
    """
    if K % 2 == 0 or not 0 < K <= min(grid):
        raise ValueError(
            f"window: got {K}, expected an odd number up to {min(grid)}, the smaller side of the image"
        )
    height, width = grid
    reach = K // 2
    pixels = torch.arange(height * width, device=P.device).unflatten(0, grid)
    inner = pixels[reach : height - reach, reach : width - reach].flatten()[:, None]
    around = (pixels[:K, :K] - pixels[reach, reach]).flatten()
    return P[:, inner, inner + around].mean(dim=1).unflatten(1, [K, K])


def maps_of_coefficients(c: Tensor, grid: tuple[int, int]) -> Tensor:
    """C_h, the impulse responses of a convolution with replicate padding: (N_h, K, K) -> (N_h, T, T)"""
    reach = c.shape[-1] // 2
    impulses = torch.eye(grid[0] * grid[1]).to(c).unflatten(1, grid)[:, None]  # (T, 1, H, W)
    answers = F.conv2d(F.pad(impulses, [reach] * 4, mode="replicate"), c[:, None])
    return answers.flatten(2).permute(1, 2, 0)  # from (T, N_h, T), keys first


def distance(P: Tensor, grid: tuple[int, int], K: int) -> Tensor:
    """d_h[q], from 0 to 2: (N_h, T, T) -> (N_h, T)"""
    return (P - maps_of_coefficients(coefficients(P, grid, K), grid)).abs().sum(dim=-1)


def value_matrices(attention: Attention) -> Tensor:
    """W_h of Eq. 10 for all heads, including W_out: (D_out, N_h, D), float64"""
    wide = copy.deepcopy(attention).double()
    W, _ = as_one_map(wide.W_val, wide.W_out)
    return W.unflatten(1, [attention.num_heads, -1])


class NearestConvolution(nn.Module):
    """An attention layer's nearest K x K convolution, in its place: (B, H, W, D) -> (B, H, W, D).

    Args:
        attention: the layer, which keeps its W_out.
        P: (N_h, T, T), its maps, or their mean over images if they depend on content.
    """

    def __init__(self, attention: Attention, P: Tensor, grid: tuple[int, int], K: int) -> None:
        super().__init__()
        weight = attention.W_val.weight.detach()
        slices = weight.unflatten(1, [len(P), -1])  # (D_out, N_h, D)
        kernel = torch.einsum("hij,ohd->odij", coefficients(P, grid, K).to(weight), slices)
        self.conv = conv_of(
            kernel, attention.W_val.bias, nn.Conv2d, padding=K // 2, padding_mode="replicate"
        )
        self.W_out = attention.W_out
        norms = value_matrices(attention).abs().sum(dim=2)  # (D_out, N_h)
        # Of any difference of outputs, for |x| <= 1.
        self.bound = float((norms @ distance(P.double(), grid, K)).max())

    def forward(self, X: Tensor) -> Tensor:
        return self.W_out(self.conv(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
