"""Heads, all at once, and their product with W_val in inference."""

from torch import Tensor, nn
from torch.nn.functional import conv2d

from sa_zoo.fast.portions import convolution_pays
from sa_zoo.fast.situation import makes_graph
from sa_zoo.models.attention import attend, attend_by_axes
from sa_zoo.models.norm import is_plain


def attended(W_val: nn.Linear, factors: list[Tensor], X: Tensor) -> Tensor:
    """sum_h P_h X W_h + b for the factors of P: (B, H, W, D) -> (B, H, W, D)"""
    if len(factors) > 1:
        return projected(W_val, attend_by_axes(factors, X))
    heads = attend(factors[0], X.flatten(1, 2))
    return projected(W_val, heads.unflatten(1, X.shape[1:3]))


def projected(W_val: nn.Linear, heads: Tensor) -> Tensor:
    """W_val(heads): (B, H, W, N_h D) -> (B, H, W, D)

    In float32 on a CPU as a 1x1 convolution: torch evaluates it by oneDNN, and nn.Linear by MKL, which is slower on AMD
    processors. In bfloat16, both are evaluated by oneDNN.
    """
    if makes_graph() or not convolution_pays(heads) or not is_plain(W_val):
        return W_val(heads)
    # (B, H, W, N_h D) in memory is an image with channels last
    image = heads.permute(0, 3, 1, 2)
    return conv2d(image, W_val.weight[:, :, None, None], W_val.bias).permute(0, 2, 3, 1)
