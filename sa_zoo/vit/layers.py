"""Access to timm's vision transformers: layers, tokens, and the positions of a kernel's heads.

B images, N tokens: first `prefix` class and register tokens, then the T = H W pixels of a grid of patches. N_h heads of
width d. delta = k - q as in models/positions.py.
"""

import itertools
import math
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sa_zoo.models.positions import displacements_between, pixels


def attentions(vit: nn.Module, *more: type[nn.Module]) -> list[Any]:
    """The attention of each block of a VisionTransformer, or of an Eva if AttentionRope is one of `more`.

    Raises ValueError unless each is timm's `Attention` or one of `more`, without a gate, with one linear map `qkv`.
    """
    classes = (VisionTransformer, Eva) if AttentionRope in more else VisionTransformer
    if not isinstance(vit, classes):
        raise ValueError(f"vit: got {type(vit).__name__}, expected a VisionTransformer of timm")
    layers: list[Any] = [getattr(block, "attn", None) for block in vit.blocks]
    for number, layer in enumerate(layers):
        known = type(layer) in (Attention, *more)
        if not known or getattr(layer, "gate", None) is not None or layer.qkv is None:
            raise ValueError(
                f"vit: got {type(layer).__name__} in block {number}, expected timm's Attention without a gate"
            )
    return layers


def grid_of(vit: VisionTransformer | Eva) -> tuple[int, int]:
    """(H, W) of the patches. Raises ValueError for a network whose grid depends on its input."""
    if vit.dynamic_img_size:
        raise ValueError("vit: got dynamic_img_size=True, expected one size of images")
    height, width = vit.patch_embed.grid_size
    return height, width


def follow_input_size(vit: VisionTransformer | Eva) -> None:
    """Let timm's `set_input_size` pass the new grid to all layers with a `set_grid`."""
    vit.set_input_size = partial(_set_input_size, vit)  # type: ignore[method-assign]


def _set_input_size(vit: Any, *arguments: Any, **named: Any) -> None:
    type(vit).set_input_size(vit, *arguments, **named)
    for layer in vit.modules():
        if hasattr(layer, "set_grid"):
            layer.set_grid(grid_of(vit))


def chosen(layers: list[Attention], blocks: list[int] | None) -> list[Attention]:
    """The layers of these blocks, in the order of the network, by default all.

    Raises ValueError for a missing block, and for an empty list.
    """
    if blocks is None:
        return layers
    if not blocks or not set(blocks) <= set(range(len(layers))):
        last = len(layers) - 1
        raise ValueError(f"blocks: got {blocks}, expected numbers from 0 to {last}")
    return [layer for number, layer in enumerate(layers) if number in blocks]


def check_images(vit: VisionTransformer, images: Tensor) -> None:
    """Raise ValueError unless the network takes these images."""
    expected = (vit.in_chans, *vit.patch_embed.img_size)
    if images.ndim != 4 or not len(images) or tuple(images.shape[1:]) != expected:
        shape = ", ".join(map(str, expected))
        raise ValueError(f"images: got {tuple(images.shape)}, expected (B, {shape})")


def projected(layer: Any, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads: (B, N, D) -> (B, N_h, N, d) each

    rope: timm's rotary embedding of the T pixels, by which their queries and keys are turned.
    """
    q, k, v = heads_apart(layer.qkv(x), 3, layer.head_dim)
    q, k = layer.q_norm(q), layer.k_norm(k)
    if rope is None:
        return q, k, v
    prefix = q.shape[2] - rope.shape[-2]
    q, k = (
        torch.cat(
            [x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, layer.rotate_half)], 2
        )
        for x in (q, k)
    )
    return q.type_as(v), k.type_as(v), v


def heads_apart(x: Tensor, parts: int, d: int) -> tuple[Tensor, ...]:
    """(B, N, parts N_h d) -> parts of (B, N_h, N, d)"""
    return x.unflatten(-1, [parts, -1, d]).permute(2, 0, 3, 1, 4).unbind(0)


def probabilities(layer: Any, x: Tensor) -> Tensor:
    """Attention of a layer, with or without quadratic scores, on its input: (B, N, D) -> (B, N_h, N, N)"""
    positioned = getattr(layer, "positioned", partial(projected, layer))
    q, k, _ = positioned(x)
    scores = layer.scale * (q @ k.mT)
    return scores.softmax(dim=-1)


def places(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Positions of the pixels in row-major order, counted from the middle of the grid: (T, 2), (row, column)"""
    rows, columns = (pixels(size, device) - (size - 1) / 2 for size in grid)
    return torch.cartesian_prod(rows, columns)


def kernel_pixels(grid: tuple[int, int], heads: int) -> Tensor:
    """Delta_h of the first heads of a kernel, nearest to the middle first: (N_h, 2), float32

    Displacements that leave the grid from every pixel are left out. With more heads than displacements, they repeat
    in the same order.
    """
    height, width = grid
    rows = range(1 - height, height)
    columns = range(1 - width, width)
    every = list(itertools.product(rows, columns))
    every.sort(key=lambda at: (math.hypot(*at), math.atan2(at[1], -at[0])))
    nearest = itertools.islice(itertools.cycle(every), heads)
    return torch.tensor(list(nearest), dtype=torch.float32)


def displacements_in(grid: tuple[int, int]) -> Tensor:
    """delta = k - q of all pairs of pixels: (T, T, 2), float32"""
    at = places(grid, torch.device("cpu"))
    return displacements_between(at, at)
