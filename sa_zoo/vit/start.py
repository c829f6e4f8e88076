"""Initial weights for plain vision transformers whose heads start as the pixels of a kernel (Theorem 1).

Only weights change: the network stays timm's own, and its checkpoints load without this package. Each head has a
matrix A_h with the factors W_qry and W_key of the head's width d:

    score_h[q, k] = x_q^T A_h x_k / sqrt(d),    A_h = B S_h B^T,    B^T B = 1
    S_h = -alpha min((delta - Delta_h)^2, clip) for the rows, and the same for the columns

The columns of B are orthonormal, and orthogonal to the mean that LayerNorm removes. The position embedding is
e_row + e_column of them, so its length, and with it the scale of the scores, is the same for all pixels. The unclipped
parabola has rank 3 per axis. Values keep timm's initialization, which is small: positions reach all blocks.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor, nn

from sa_zoo.convolution.network_conversion import call_before
from sa_zoo.models.positions import pixels, quadratic_scores
from sa_zoo.vit.layers import (
    attentions,
    check_images,
    chosen,
    displacements_in,
    grid_of,
    kernel_pixels,
    probabilities,
)

START_IMAGES = 16  # on which scales are set and attention is measured


@torch.no_grad()
def start_as_convolution(
    vit: nn.Module,
    alpha: float = 8.0,
    clip: float = 1.0,
    blocks: list[int] | None = None,
    images: Tensor | None = None,
    generator: Generator | None = None,
) -> Tensor:
    """Replace the initial weights of a VisionTransformer of timm, in place, so that head h attends to pixel h.

    Args:
        vit: with a learned position embedding, and without qk_norm. Its grid, tokens and heads are free.
        alpha: sharpness of the heads, per squared pixel.
        clip: squared distance, in pixels, from which on scores are constant; infinity: nowhere.
        blocks: those to change, by default all.
        images: (B, C, H, W) as the network takes them, by default noise of variance 1.
        generator: of random numbers, on the CPU; by default torch's own.

    Returns:
        (blocks, N_h), in the order of the network: the mean share of attention on the pixel of each head, over the
        images and over the queries whose pixel lies in the image.

    Raises ValueError for a network or an argument that does not fit; the network is then unchanged.
    """
    layers = attentions(vit)
    assert isinstance(vit, VisionTransformer)
    _check(vit, layers, alpha, clip)
    grid = grid_of(vit)
    started = chosen(layers, blocks)
    if images is None:
        size = (START_IMAGES, vit.in_chans, *vit.patch_embed.img_size)
        images = torch.randn(size, generator=generator)
    check_images(vit, images)
    images = images.to(vit.pos_embed)
    Delta = kernel_pixels(grid, layers[0].num_heads)
    basis = _set_positions(vit, images, generator)
    S = _scores(grid, Delta, alpha, clip)
    # [k = q + Delta_h]: (N_h, T, T)
    target = (displacements_in(grid) == Delta[:, None, None]).all(dim=-1).to(images.device)
    P = F.normalize(_patches(vit), dim=-1)
    shares = []

    def begin(layer: Attention, x: Tensor) -> None:
        """Initialize this layer from the output of the layers already initialized."""
        length = float((x[:, -len(P) :] * P).sum(dim=-1).mean())
        # A pixel's row and column have a length of length / sqrt(2) each.
        _set_scores(layer, basis, S / (layer.scale * length**2 / 2))
        of_pixels = probabilities(layer, x)[..., -len(P) :, -len(P) :].mean(dim=0)
        shares.append((of_pixels * target).sum(dim=(1, 2)) / target.sum(dim=(1, 2)))

    training = vit.training
    call_before(vit, started, images, begin)
    vit.train(training)
    return torch.stack(shares)


def _check(vit: VisionTransformer, layers: list[Attention], alpha: float, clip: float) -> None:
    """Raise ValueError for a network whose heads cannot look at positions, and for scores that choose no pixel."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha: got {alpha}, expected a positive number")
    if not clip > 0:
        raise ValueError(f"clip: got {clip}, expected a positive number or infinity")
    if vit.pos_embed is None:
        raise ValueError(
            "vit: got pos_embed=None, expected a learned position embedding, which heads look at"
        )
    if not isinstance(layers[0].q_norm, nn.Identity):
        raise ValueError("vit: got qk_norm=True, expected False: it removes the sharpness of heads")


def _patches(vit: VisionTransformer) -> Tensor:
    """The position embedding of pixels, without that of a class token: (T, D)"""
    assert vit.pos_embed is not None
    return vit.pos_embed[0, -vit.patch_embed.num_patches :]


def _set_positions(vit: VisionTransformer, images: Tensor, generator: Generator | None) -> Tensor:
    """Set the position embedding, of the mean length of embedded patches; returns its basis B, (D, H + W)"""
    grid = grid_of(vit)
    D = vit.embed_dim
    if sum(grid) >= D:
        raise ValueError(f"vit: got embed_dim={D}, expected more than {sum(grid)}, H + W")
    mean = torch.ones(D, 1)
    drawn = torch.randn(D, sum(grid), generator=generator)
    orthonormal, _ = torch.linalg.qr(torch.cat([mean, drawn], dim=1))
    basis = orthonormal[:, 1:]
    content = vit.patch_embed(images).flatten(1, -2)
    content = content - content.mean(dim=-1, keepdim=True)
    rows, columns = basis.T.split(grid)
    P = (rows[:, None] + columns).flatten(0, 1) / 2**0.5
    _patches(vit).copy_(float(content.norm(dim=-1).mean()) * P)
    return basis


def _scores(grid: tuple[int, int], Delta: Tensor, alpha: float, clip: float) -> Tensor:
    """S_h: those of the rows, then those of the columns on the diagonal, (N_h, H + W, H + W)"""
    sharpness = torch.full([len(Delta)], alpha)
    axes = []
    for size, center in zip(grid, Delta.T, strict=True):
        at = pixels(size, Delta.device)
        scores = quadratic_scores(center, sharpness, at, at)
        if math.isfinite(clip):
            # Softmax ignores the added constant; scores far from Delta, and their noise, become zero.
            scores = (scores + alpha * clip).clamp(min=0)
        axes.append(scores)
    return torch.stack([torch.block_diag(*of_head) for of_head in zip(*axes, strict=True)])


def _set_scores(layer: Attention, basis: Tensor, S: Tensor) -> None:
    """Write the factors of S into queries and keys, and zero their biases."""
    d = layer.head_dim
    U, s, V = torch.linalg.svd(S)
    root = s[:, None, :d].sqrt()
    queries = basis @ (U[..., :d] * root)
    keys = basis @ (V.mT[..., :d] * root)
    weight = layer.qkv.weight.unflatten(0, [3, layer.num_heads, d])
    weight[:2] = 0
    weight[:2, :, : root.shape[-1]] = torch.stack([queries, keys]).mT.to(weight)
    if layer.qkv.bias is not None:
        layer.qkv.bias[: 2 * layer.proj.in_features] = 0
