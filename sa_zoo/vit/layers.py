"""Access to timm's vision transformers: their attention layers, and the positions of patches.

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

from sa_zoo.models.positions import pixels


def attentions(vit: nn.Module) -> list[Any]:
    """The attention of each block of a VisionTransformer or an Eva.

    Raises ValueError unless each is timm's `Attention` or `AttentionRope`, without a gate, with one linear map `qkv`.
    """
    if not isinstance(vit, VisionTransformer | Eva):
        raise ValueError(f"vit: got {type(vit).__name__}, expected a VisionTransformer of timm")
    layers: list[Any] = [getattr(block, "attn", None) for block in vit.blocks]
    for number, layer in enumerate(layers):
        known = type(layer) in (Attention, AttentionRope)
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


def projected(layer: Any, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads: (B, N, D) -> (B, N_h, N, d) each

    rope: timm's rotary embedding of the T pixels, by which their queries and keys are turned.
    """
    q, k, v = layer.qkv(x).unflatten(-1, [3, -1, layer.head_dim]).permute(2, 0, 3, 1, 4)
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
