"""Initial weights by which the heads of a plain vision transformer begin as the pixels of a kernel (Theorem 1).

Only numbers change: the network stays timm's own, and what is trained from this start loads without this package.
For every head there is a matrix A_h, whose factors of the head's width d are W_qry and W_key:

    score_h[q, k] = x_q^T A_h x_k / sqrt(d),    A_h = B S_h B^T,    B^T B = 1

    quadratic   S_h = -alpha min((k - q - Delta_h)^2, clip) for the rows, and the same for the columns, over the
                position embedding  e_row + e_column,  whose vectors are orthonormal, and orthogonal to the mean that
                LayerNorm removes: its length, and with it the scale of the scores, is that of all pixels. The
                unclipped parabola has rank 3 per axis.
    impulse     P A_h P^T = 1000 [k = q + Delta_h] + noise, with P the normalized position embedding (Zheng et al. 2025,
                arXiv:2505.19985; their norms, but every tap is used, on any grid)
    mimetic     A_h = .7 I + .7 noise (Trockman and Kolter 2023, arXiv:2305.09828)

impulse and mimetic also set W_out W_val = -.4 I + .4 noise, as published. quadratic leaves timm's values as they are:
they are so small that the positions B reach all blocks.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor, nn

from sa_zoo.models.positions import pixels, quadratic_scores
from sa_zoo.vit.layers import (
    attentions,
    check_images,
    chosen,
    grid_of,
    kernel_pixels,
    probabilities,
    targets,
)

IMAGES = 16  # random ones, on which scales are set and attention is measured
# As published for impulse: scores on the taps and their noise elsewhere, the standard deviation of the position
# embedding, the norm of W_qry and of W_key of a head.
IMPULSE = 1000.0
OFF_TAP = 1.8
POSITIONS = 0.36
FACTORS = 7.0
# As published for mimetic.
QUERY_KEY = 0.7
VALUE = 0.4

# B (D, r) and S (N_h, r, r) of a layer whose positions have this length in its input
Forms = Callable[[Attention, float], tuple[Tensor, Tensor]]


@torch.no_grad()
def start_as_convolution(
    vit: nn.Module,
    method: str = "quadratic",
    alpha: float = 8.0,
    clip: float = 1.0,
    blocks: list[int] | None = None,
    images: Tensor | None = None,
    generator: Generator | None = None,
) -> Tensor:
    """Replace the initial weights of a VisionTransformer of timm, in place, so that head h attends to pixel h.

    Args:
        vit: with a learned position embedding, and without qk_norm. Its grid, tokens and heads are free.
        method: "quadratic", "impulse" or "mimetic"; see above.
        alpha: sharpness of quadratic heads, per squared pixel.
        clip: squared distance, in pixels, from which on quadratic scores are constant; infinity: nowhere.
        blocks: those to change, by default all.
        images: (B, C, H, W) as the network takes them, by default noise of variance 1.
        generator: of the CPU, which the random numbers come from; by default torch's own.

    Returns:
        (blocks, N_h), in the order of the network: the mean share of attention on the pixel of each head, over the
        images and over the queries whose pixel lies in the image. Heads of "mimetic" are meant to attend to the query's
        own pixel.

    Raises ValueError for a network or an argument that does not fit; the network is then as it was.
    """
    layers = attentions(vit)
    assert isinstance(vit, VisionTransformer)
    _check(vit, layers, alpha, clip)
    grid = grid_of(vit)
    started = chosen(layers, blocks)
    images = _images(vit, images, generator)
    Delta = kernel_pixels(grid, layers[0].num_heads)
    if method == "mimetic":
        Delta = torch.zeros_like(Delta)
    forms = _forms(method, vit, Delta, alpha, clip, images, generator)
    target = targets(grid, Delta).to(images.device)
    P = F.normalize(_patches(vit), dim=-1)
    shares = []

    def begin(layer: Attention, inputs: tuple[Tensor, ...]) -> None:
        """Before a layer runs for the first time, its input is what the layers before it, already changed, give."""
        (x,) = inputs
        length = float((x[:, -len(P) :] * P).sum(dim=-1).mean())
        _set_scores(layer, *forms(layer, length))
        if method != "quadratic":
            _set_values(layer, generator)
        shares.append(_share(probabilities(layer, x), target))

    training = vit.training
    with ExitStack() as hooks:
        for layer in started:
            hooks.enter_context(layer.register_forward_pre_hook(begin))
        vit.eval()(images)
    vit.train(training)
    return torch.stack(shares)


def _images(vit: VisionTransformer, images: Tensor | None, generator: Generator | None) -> Tensor:
    """The images on which scales are set, by default noise. Raises ValueError for some that do not fit."""
    if images is None:
        size = (IMAGES, vit.in_chans, *vit.patch_embed.img_size)
        images = torch.randn(size, generator=generator)
    check_images(vit, images)
    return images.to(vit.pos_embed)


def _share(P: Tensor, target: Tensor) -> Tensor:
    """Mean attention on targets: (B, N_h, N, N), (N_h, T, T), bool -> (N_h,)"""
    T = target.shape[1]
    of_pixels = P[..., -T:, -T:].mean(dim=0)
    return (of_pixels * target).sum(dim=(1, 2)) / target.sum(dim=(1, 2))


def _forms(
    method: str,
    vit: VisionTransformer,
    Delta: Tensor,
    alpha: float,
    clip: float,
    images: Tensor,
    generator: Generator | None,
) -> Forms:
    match method:
        case "quadratic":
            return _quadratic(vit, Delta, alpha, clip, images, generator)
        case "impulse":
            return _impulse(vit, Delta, generator)
        case "mimetic":
            return partial(_mimetic, vit.embed_dim, generator)
    raise ValueError(f"method: got {method}, expected quadratic, impulse or mimetic")


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
    """The part of the position embedding that belongs to pixels, which a class token may precede: (T, D)"""
    assert vit.pos_embed is not None
    return vit.pos_embed[0, -vit.patch_embed.num_patches :]


def _quadratic(
    vit: VisionTransformer,
    Delta: Tensor,
    alpha: float,
    clip: float,
    images: Tensor,
    generator: Generator | None,
) -> Forms:
    """Set the position embedding, as long as a patch of the images is on average; the scores over its vectors."""
    grid = grid_of(vit)
    height, width = grid
    D = vit.embed_dim
    if height + width >= D:
        raise ValueError(f"vit: got embed_dim={D}, expected more than {height + width}, H + W")
    mean = torch.ones(D, 1)
    drawn = torch.randn(D, height + width, generator=generator)
    orthonormal, _ = torch.linalg.qr(torch.cat([mean, drawn], dim=1))
    basis = orthonormal[:, 1:]
    content = vit.patch_embed(images).flatten(1, -2)
    content = content - content.mean(dim=-1, keepdim=True)
    rows, columns = basis.T.split([height, width])
    P = (rows[:, None] + columns[None, :]).flatten(0, 1) / 2**0.5
    length_of_content = float(content.norm(dim=-1).mean())
    _patches(vit).copy_(length_of_content * P)
    S = _scores(grid, Delta, alpha, clip)

    def forms(layer: Attention, length: float) -> tuple[Tensor, Tensor]:
        # A pixel's row and column have a length of length / sqrt(2) each.
        scale = layer.scale * length**2 / 2
        return basis, S / scale

    return forms


def _scores(grid: tuple[int, int], Delta: Tensor, alpha: float, clip: float) -> Tensor:
    """S_h: those of the rows, then those of the columns on the diagonal, (N_h, H + W, H + W)"""
    S = torch.zeros(len(Delta), sum(grid), sum(grid))
    sharpness = torch.full([len(Delta)], alpha)
    for axis, start in enumerate((0, grid[0])):
        at = pixels(grid[axis], S.device)
        scores = quadratic_scores(Delta[:, axis], sharpness, at, at)
        if math.isfinite(clip):
            # A constant, which no softmax sees: with it, scores far from Delta and their noise are zero.
            scores = (scores + alpha * clip).clamp(min=0)
        end = start + grid[axis]
        S[:, start:end, start:end] = scores
    return S


def _impulse(vit: VisionTransformer, Delta: Tensor, generator: Generator | None) -> Forms:
    """Draw a position embedding of the published length."""
    taps = targets(grid_of(vit), Delta)
    P = torch.empty(taps.shape[1], vit.embed_dim)
    nn.init.trunc_normal_(P, std=POSITIONS, generator=generator)
    _patches(vit).copy_(P)

    def forms(layer: Attention, length: float) -> tuple[Tensor, Tensor]:
        noise = torch.randn(taps.shape, generator=generator)
        M = torch.where(taps, IMPULSE, OFF_TAP * noise)
        # The pseudo-inverse of P from as many of its directions as a head has channels.
        d = layer.head_dim
        normalized = F.layer_norm(P, P.shape[-1:])
        U, s, V = torch.linalg.svd(normalized, full_matrices=False)
        inverse = U[:, :d] / s[:d]
        S = inverse.T @ M @ inverse
        nuclear = torch.linalg.svdvals(S).sum(dim=-1)  # the squared norm of either factor
        scale = FACTORS**2 / nuclear
        return V[:d].T, scale[:, None, None] * S

    return forms


def _mimetic(
    D: int, generator: Generator | None, layer: Attention, length: float
) -> tuple[Tensor, Tensor]:
    identity = torch.eye(D)
    noise = torch.randn(layer.num_heads, D, D, generator=generator) / D**0.5
    return identity, QUERY_KEY * (noise + identity)


def _set_scores(layer: Attention, basis: Tensor, S: Tensor) -> None:
    """Write the factors of the forms into queries and keys, whose biases become zero."""
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


def _set_values(layer: Attention, generator: Generator | None) -> None:
    """Write the factors of W_out W_val as published for impulse and mimetic; the biases of the layer become zero."""
    D = layer.proj.in_features
    noise = torch.randn(D, D, generator=generator) / D**0.5
    U, s, V = torch.linalg.svd(VALUE * (noise - torch.eye(D)))
    root = s.sqrt()
    layer.proj.weight.copy_(U * root)
    layer.qkv.weight[2 * D :] = root[:, None] * V
    for bias in (layer.qkv.bias, layer.proj.bias):
        if bias is not None:
            bias.zero_()
