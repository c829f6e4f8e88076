"""The product of a layer's heads with W_val in inference."""

from torch import Tensor, nn
from torch.nn.functional import conv2d

from sa_zoo.kernels.portions import convolution_pays
from sa_zoo.kernels.situation import makes_graph
from sa_zoo.models.norm import is_plain


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
