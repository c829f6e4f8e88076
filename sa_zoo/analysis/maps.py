"""Attention maps of any supported network, layer by layer: SANet, convolutions as attention, timm's transformers.

Legend: models/attention.py. A layer's queries are the pixels of `grid`, its keys those of `keys`. Both are the same
pixels, except in a convolution as attention: its keys are the padded image, and displacements of the query (i, j)
count from the key stride * (i, j) + center.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.utils.attention_extract import AttentionExtract
from torch import Tensor, nn

from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.network_conversion import call_before
from sa_zoo.models.attention import Attention, probabilities_from

Pixel = Sequence[int]  # (row, column), or (H, W)


@dataclass(frozen=True)
class LayerMaps:
    """Attention of one layer on B images. If `positional`, shapes have no axis B.

    `factors` holds P itself, (B, N_h, T_queries, T_keys), or its factors along the axes, (N_h, H_queries, H_keys) and
    (N_h, W_queries, W_keys). `at` handles both.
    """

    name: str  # of the module in the network
    module: Any
    grid: Pixel  # (H, W) of the queries
    keys: Pixel  # (H, W) of the keys
    image: Pixel  # (H, W) of the layer's input: the keys without padding
    positional: bool  # whether the maps are the same for all images
    factors: Sequence[Tensor]
    kind: str = "stored"  # the explorer's formula for the maps, as in Term.drawn
    stride: Pixel = (1, 1)
    center: Pixel = (0, 0)
    padding: Pixel = (0, 0)  # keys before the first pixel of the image
    # (B, N_h, T): share of class and register tokens, excluded from the maps
    token_share: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.factors[0].shape[-3]

    def at(self, query: Pixel) -> Tensor:
        """The maps of the query pixel (row, column): (N_h, *keys) or (B, N_h, *keys)"""
        row, column = query
        if len(self.factors) == 1:
            P = self.factors[0][..., row * self.grid[1] + column, :]
            return P.unflatten(-1, self.keys)
        down, across = self.factors
        return down[:, row, :, None] * across[:, column, None, :]

    def origin(self, query: Pixel) -> Pixel:
        """The key from which displacements of a query pixel count, both (row, column)."""
        places = zip(self.stride, query, self.center, strict=True)
        return tuple(step * at + first for step, at, first in places)


@torch.no_grad()
def attention_layers(model: nn.Module, images: Tensor) -> list[LayerMaps]:
    """The attention of every layer of a network on `images` (B, C, H, W), in order of execution.

    The model is put in eval mode. For timm's vision transformers, layers without tokens on one grid (windows) are
    omitted, and attention to class and register tokens is removed from the maps.

    Raises:
        ValueError: for a network without attention over the pixels of a grid.
    """
    own: dict[nn.Module, str] = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, Attention)
        or (isinstance(module, ConvolutionalAttention) and len(module.stride) == 2)
    }
    layers = []

    def record(module: nn.Module, x: Tensor) -> None:
        maps_of: Any = _of_attention if isinstance(module, Attention) else _of_convolution
        layers.append(maps_of(own[module], module, x))

    if own:
        call_before(model, own, images, record)
    else:
        layers = _of_transformer(model, images)
    if not layers:
        raise ValueError(
            f"model: got {type(model).__name__}, expected one with attention over the pixels of a grid"
        )
    return layers


def _of_attention(name: str, module: Attention, X: Tensor) -> LayerMaps:
    """X: (B, H, W, D)"""
    positional = all(term.positional for term in module.terms)
    kind = module.terms[0].drawn if len(module.terms) == 1 else "stored"
    by_axes = module.separable and kind != "stored"
    factors = module.axis_probabilities(X) if by_axes else [module.probabilities(X)]
    grid = X.shape[1:3]
    return LayerMaps(name, module, grid, grid, grid, positional, factors, kind)


def _of_convolution(name: str, module: ConvolutionalAttention, x: Tensor) -> LayerMaps:
    """x: (B, D_in, H, W)"""
    image = list(x.shape[2:])
    sizes = module.pad.sizes(image)
    factors = [probabilities_from(module.axis_scores(axis, sizes)) for axis in range(2)]
    return LayerMaps(
        name,
        module,
        grid=module.queries(sizes),
        keys=sizes,
        image=image,
        positional=True,
        factors=factors,
        kind="quadratic",
        stride=module.stride,
        center=module.center,
        padding=module.pad.amounts(image)[0],
    )


def _of_transformer(model: nn.Module, images: Tensor) -> list[LayerMaps]:
    """Layers of a timm vision transformer, by timm's own tool, with fused attention off meanwhile."""
    size = getattr(getattr(model, "patch_embed", None), "dynamic_feat_size", None)
    if size is None:
        return []
    grid = size(images.shape[2:])
    prefix = getattr(model, "num_prefix_tokens", 0)
    fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
    try:
        for module in fused:
            module.fused_attn = False  # type: ignore[assignment]  # nn.Module declares Tensor | Module
        # torch.fx warns of nodes traced only in training mode
        with warnings.catch_warnings(action="ignore"):
            extracted = AttentionExtract(model)(images)
    except RuntimeError as error:  # the tool finds no softmax
        raise ValueError(
            f"model: got {type(model).__name__}, expected one whose attention timm can extract"
        ) from error
    finally:
        for module in fused:
            module.fused_attn = True  # type: ignore[assignment]
    layers = []
    for node, P in extracted.items():  # (B, N_h, tokens, tokens), class and register tokens first
        extra = P.shape[-1] - math.prod(grid)
        if P.ndim != 4 or P.shape[-2] != P.shape[-1] or not 0 <= extra <= prefix:
            continue
        name = node.rpartition(".")[0]
        module = model.get_submodule(name)
        kept = P[..., extra:, extra:].float()
        share = kept.sum(dim=-1, keepdim=True)
        factors = (kept / share.clamp(min=torch.finfo(torch.float32).tiny),)
        token_share = 1 - share.squeeze(-1)
        layers.append(
            LayerMaps(name, module, grid, grid, grid, False, factors, token_share=token_share)
        )
    return layers
