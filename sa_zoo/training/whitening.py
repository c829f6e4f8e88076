"""Initial weights of the first convolution, as a whitening transform of its patches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sa_zoo.data.splits import Split

WHITENED_IMAGES = 5000  # of the training split, for the covariance of patches
EPSILON = 1e-2  # added to the eigenvalues, so that noise is not amplified; pixels have a variance of about 1


@torch.no_grad()
def whiten_first_convolution(model: nn.Module, split: Split) -> None:
    """Set filters to eigenvectors of the patch covariance over the square root of their eigenvalue, and the negatives.

    Their outputs have a variance of 1, or less where patches vary less than EPSILON. Biases and further filters keep
    their values. Raises ValueError if the model does not start with a Conv2d of all channels.
    """
    name = getattr(model, "pretrained_cfg", {}).get("first_conv") or ""
    # a converted CNN names the kernel of its attention, even if `layers` kept the stem a convolution
    conv = dict(model.named_modules()).get(name.removesuffix(".W_val"))
    if not isinstance(conv, nn.Conv2d) or conv.groups != 1:
        raise ValueError(
            f"model.whiten: got a model with first_conv = {name!r}, expected the name of its first Conv2d"
        )
    # (B, C h w, patches per image)
    patches = F.unfold(split.first(WHITENED_IMAGES), conv.kernel_size, stride=conv.kernel_size)
    patches = patches.transpose(0, 1).flatten(1).double()
    filters = whitening_filters(patches)
    filters = torch.cat([filters, -filters])[: len(conv.weight)].to(conv.weight)
    conv.weight[: len(filters)] = filters.unflatten(1, conv.weight.shape[1:])


def whitening_filters(patches: Tensor) -> Tensor:
    """Eigenvectors of the covariance over the square root of eigenvalues, largest first: (D, patches) -> (D, D)"""
    values, vectors = torch.linalg.eigh(patches.cov())
    return (vectors / (values + EPSILON).sqrt()).T.flip(0)
