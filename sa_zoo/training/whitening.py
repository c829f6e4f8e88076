"""Initial weights of a first convolution that whiten the patches it reads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGES = 5000  # whose patches are measured
EPSILON = 1e-2  # added to eigenvalues, in units of squared normalised pixels


@torch.no_grad()
def whiten_first_convolution(model: nn.Module, images: Tensor) -> None:
    """Set the first convolution to the eigenvectors of the covariance of patches, and their negatives.

    Each filter gives outputs of variance 1 (less where the variance of patches is below EPSILON); filters beyond twice
    the number of eigenvectors keep their weights. images: normalised, (N, C, H, W).
    """
    conv = model.get_submodule(model.pretrained_cfg["first_conv"])
    patches = (
        F.unfold(images[:IMAGES], conv.kernel_size, stride=conv.kernel_size).transpose(1, 2).flatten(0, 1).double()
    )
    values, vectors = torch.linalg.eigh(patches.T.cov())
    filters = (vectors / (values + EPSILON).sqrt()).T.flip(0).to(conv.weight)  # largest variance first
    filters = torch.cat([filters, -filters])[: len(conv.weight)]
    conv.weight[: len(filters)] = filters.unflatten(1, conv.weight.shape[1:])
