"""Heads of a trained vision transformer as depthwise convolutions of their values, without training.

The maps of a head between pixels, P_h[q, k] of each image, are compared with those of a K x K convolution with
replicate padding, C_h = sum_a c_h[a] [k = q + a] (nearest.py). c is the mean of P over images, and over the queries
whose window lies in the image. Class and register tokens keep their attention; pixels attend to them by the mean m_h:

    d_h[q] = sum_pixels |P_h[q, k] - C_h[q, k]| + sum_tokens |P_h[q, k] - m_h[k]|

On these images, replacing the heads R changes no output of their layer by more than

    sum_{h in R} max_images (max_q d_h[q]) (max_{k, o} |W_out_h v_h[k]|_o)
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sa_zoo.convolution.nearest import coefficients, maps_of_coefficients
from sa_zoo.convolution.network_conversion import call_before
from sa_zoo.vit.layers import (
    attentions,
    check_images,
    follow_input_size,
    grid_of,
    heads_apart,
    probabilities,
    projected,
)
from sa_zoo.vit.positions import PositionAttention


@dataclass(frozen=True)
class LocalHeads:
    """Attention of the heads of one layer on some images, and its distance from convolutions."""

    coefficients: Tensor  # c, (N_h, K, K)
    tokens: Tensor  # m, (N_h, prefix)
    distance: Tensor  # mean of d over images and queries, from 0 to 2: (N_h,)
    bound: Tensor  # on the change of an output by one head: (N_h,)


class ConvolvedAttention(nn.Module):
    """timm's attention with some heads as depthwise convolutions: (B, N, D) -> (B, N, D).

    Args:
        attention: the layer, with or without quadratic scores; its weights are copied.
        local: its heads, measured.
        heads: numbers of the heads to replace by convolutions.
        grid: (H, W) of the pixels.
    """

    def __init__(
        self,
        attention: Any,
        local: LocalHeads,
        heads: Sequence[int],
        grid: tuple[int, int],
    ) -> None:
        super().__init__()
        self.prefix = local.tokens.shape[1]
        self.head_dim = attention.head_dim
        self.scale = attention.scale
        kept = [head for head in range(attention.num_heads) if head not in heads]
        weight = attention.qkv.weight
        self.kept = heads_of(attention, kept)
        # Only class and register tokens need queries and keys.
        self.parts = [0, 1, 2] if self.prefix else [2]
        self.replaced = projection_of(attention, self.parts, heads)
        self.q_norm = attention.q_norm
        self.k_norm = attention.k_norm
        kernel = local.coefficients[heads].to(weight).repeat_interleave(self.head_dim, dim=0)
        self.kernel = nn.Parameter(kernel[:, None])
        self.tokens = nn.Parameter(local.tokens[heads].to(weight))
        self.proj = copy.deepcopy(attention.proj)
        columns = attention.proj.weight.detach().unflatten(1, [attention.num_heads, -1])
        self.proj.weight = nn.Parameter(columns[:, [*kept, *heads]].flatten(1))
        self.grid = grid

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Expect (H, W) pixels."""
        self.grid = grid

    def forward(self, x: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        assert attn_mask is None and not is_causal  # timm's block passes them
        convolved = self.convolved(x).transpose(1, 2).flatten(2)
        return self.proj(torch.cat([self.kept(x), convolved], dim=-1))

    def convolved(self, x: Tensor) -> Tensor:
        """The replaced heads: (B, replaced, N, d)"""
        *looking, v = heads_apart(self.replaced(x), len(self.parts), self.head_dim)
        channels = v[:, :, self.prefix :].transpose(2, 3).flatten(1, 2)  # (B, replaced d, T)
        images = channels.unflatten(-1, self.grid)
        reach = self.kernel.shape[-1] // 2
        padded = F.pad(images, [reach] * 4, mode="replicate")
        pixels = F.conv2d(padded, self.kernel, groups=len(self.kernel)).flatten(2)
        pixels = pixels.unflatten(1, [-1, self.head_dim]).transpose(2, 3)
        if not looking:
            return pixels
        q, k = looking
        pixels = pixels + self.tokens[:, None] @ v[:, :, : self.prefix]
        q = self.q_norm(q[:, :, : self.prefix])
        tokens = F.scaled_dot_product_attention(q, self.k_norm(k), v, scale=self.scale)
        return torch.cat([tokens, pixels], dim=2)


def heads_of(attention: Any, heads: Sequence[int]) -> Any:
    """Some heads of a layer, side by side: (B, N, D) -> (B, N, heads d)"""
    some = copy.deepcopy(attention)
    some.num_heads = len(heads)
    some.attn_dim = len(heads) * attention.head_dim
    some.qkv = projection_of(attention, [0, 1, 2], heads)
    some.proj = nn.Identity()
    some.proj_drop = nn.Identity()
    if isinstance(some, PositionAttention):
        Delta = some.Delta.detach().unflatten(0, [-1, 2])
        some.Delta = nn.Parameter(Delta[heads].flatten())
        some.alpha = nn.Parameter(some.alpha.detach()[heads])
    return some


def projection_of(attention: Any, parts: Sequence[int], heads: Sequence[int]) -> nn.Linear:
    """A layer for queries (0), keys (1) and values (2) of some heads: (B, N, D) -> (B, N, parts heads d)"""
    some = copy.deepcopy(attention.qkv)
    for name, parameter in some.named_parameters():
        rows = parameter.detach().unflatten(0, [3, attention.num_heads, -1])
        setattr(some, name, nn.Parameter(rows[parts][:, heads].flatten(0, 2)))
    some.out_features = len(some.weight)
    return some


def heads_on(layer: Any, x: Tensor, grid: tuple[int, int], K: int) -> LocalHeads:
    """The heads of a layer on its input (B, N, D)."""
    if not isinstance(layer.norm, nn.Identity):
        raise ValueError("vit: got scale_attn_norm=True, expected False")
    prefix = x.shape[1] - math.prod(grid)
    P = probabilities(layer, x)[:, :, prefix:]  # queries are pixels: (B, N_h, T, N)
    mean = P.mean(dim=0)
    c = coefficients(mean[..., prefix:], grid, K)
    m = mean[..., :prefix].mean(dim=1)
    of_tokens = m[:, None].expand(-1, P.shape[2], -1)
    nearest = torch.cat([of_tokens, maps_of_coefficients(c, grid)], dim=-1)
    d = (P - nearest).abs().sum(dim=-1)  # (B, N_h, T)
    values = projected(layer, x)[2]  # (B, N_h, N, d)
    outer = layer.proj.weight.unflatten(1, [layer.num_heads, -1])
    largest = torch.einsum("bhkd,ohd->bhko", values, outer).abs().amax(dim=(2, 3))
    bound = (d.amax(dim=2) * largest).amax(dim=0)
    return LocalHeads(c, m, d.mean(dim=(0, 2)), bound)


@torch.no_grad()
def local_heads(vit: VisionTransformer, images: Tensor, K: int = 3) -> list[LocalHeads]:
    """Measure the heads of every block on images (B, C, H, W), as the network takes them.

    Raises ValueError for a network other than timm's plain ones, for images it does not take, and for an even window or
    one larger than the grid.
    """
    layers = attentions(vit, PositionAttention)
    grid = grid_of(vit)
    check_images(vit, images)
    found: list[LocalHeads] = []
    call_before(vit, layers, images, lambda layer, x: found.append(heads_on(layer, x, grid, K)))
    return found


def most_local(
    local: Sequence[LocalHeads],
    most: int | None = None,
    below: float | None = None,
) -> list[list[int]]:
    """The `most` most local heads of all layers, with a distance below `below`, listed by layer.

    Raises ValueError for a negative `most`, or one larger than the number of heads.
    """
    ranked = sorted(
        (float(distance), layer, head)
        for layer, heads in enumerate(local)
        for head, distance in enumerate(heads.distance)
    )
    if most is not None and not 0 <= most <= len(ranked):
        raise ValueError(f"most: got {most}, expected a number from 0 to {len(ranked)}")
    if below is not None:
        ranked = [row for row in ranked if row[0] < below]
    heads: list[list[int]] = [[] for _ in local]
    for _, layer, head in ranked[:most]:
        heads[layer].append(head)
    return [sorted(some) for some in heads]


def replace_heads(vit: Any, local: Sequence[LocalHeads], heads: Sequence[list[int]]) -> nn.Module:
    """Replace these heads of each block by their convolutions, in place."""
    for block, measured, some in zip(vit.blocks, local, heads, strict=True):
        if some:
            block.attn = ConvolvedAttention(block.attn, measured, some, grid_of(vit))
    follow_input_size(vit)
    return vit


def convolve_heads(
    vit: VisionTransformer,
    images: Tensor,
    K: int = 3,
    most: int | None = None,
    below: float | None = None,
) -> list[list[int]]:
    """Replace the most local heads of a trained VisionTransformer of timm by depthwise K x K convolutions, in place.

    Args:
        vit: on the device of the images; it is put in eval mode.
        images: (B, C, H, W) as the network takes them, to measure the heads: some dozens are enough.
        K: an odd number of patches.
        most, below: how many heads, and below which distance; by default all.

    Returns the numbers of the replaced heads, block by block.
    Raises ValueError as `local_heads` and `most_local` do; no head is then replaced.
    """
    local = local_heads(vit, images, K)
    heads = most_local(local, most, below)
    replace_heads(vit, local, heads)
    return heads
