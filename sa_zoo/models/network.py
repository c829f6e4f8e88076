"""The paper's network (Section 4): 2x2 space-to-depth and a linear map, blocks of attention, mean over pixels.

Pure torch: the timm and transformers interfaces are built on it. Everything between the embedding and the head has the
layout (B, H, W, D).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from .attention import Attention
from .blocks import Block, PostNormBlock
from .layout import Grid, ImageSize, Layout, Level, check_positive
from .terms import Term, Terms


class Embedding:
    """The embedding of images, which timm's and transformers' models share."""

    patch_embed: nn.Conv2d
    reduction: int

    def embed(self, x: Tensor) -> Tensor:
        """Images (B, C, R H, R W) -> tokens (B, H, W, D)"""
        # One assertion per axis: torch.fx cannot trace `and`, and TorchScript accepts only a literal as the message.
        torch._assert(x.dim() == 4, "images: expected four dimensions, (B, C, H, W)")
        R = self.reduction
        torch._assert(x.shape[2] % R == 0, "image height: expected a multiple of model.reduction")
        torch._assert(x.shape[3] % R == 0, "image width: expected a multiple of model.reduction")
        # Without `contiguous`, every product would copy it.
        return self.patch_embed(x).permute(0, 2, 3, 1).contiguous()


class AttentionNetwork(Embedding, nn.Module):
    """Embedding, blocks, mean over pixels and a linear map: shared by the paper's network and plain ones.

    Args:
        patch_embed: images (B, C, height, width) -> tokens (B, D, H, W).
        blocks: applied one after the other.
        layout: of the tokens.
        img_size, num_classes, global_pool, drop_rate: as in SANet.
    """

    sizes: dict[str, Any]  # patch_size, embed_dim, depth and so on, by the names of arguments

    def __init__(
        self,
        patch_embed: nn.Conv2d,
        blocks: Iterable[Block],
        layout: Layout,
        img_size: ImageSize,
        num_classes: int,
        global_pool: str,
        drop_rate: float,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.reduction = layout.reduction
        self.in_chans = patch_embed.in_channels
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = self.embed_dim = layout.levels[-1].dim
        self.img_size = layout.checked_size(img_size)
        self.global_pool = checked_pool(global_pool)
        self.patch_embed = patch_embed
        self.blocks: Any = nn.Sequential(*blocks)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = new_head(self.num_features, num_classes, **dd)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, C, R H, R W) -> tokens (B, H, W, D) of the last block, with R the `reduction`"""
        return self.blocks(self.embed(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, H, W, D) -> logits (B, num_classes), or (B, D) with pre_logits; unpooled if global_pool is ''."""
        if self.global_pool == "avg":
            x = x.mean(dim=(1, 2))  # (B, D)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, R H, R W) -> logits (B, num_classes)"""
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def attention_maps(self, x: Tensor) -> list[Tensor]:
        """The attention probabilities of each layer for images (B, C, R H, R W), at least float32.

        (N_h, T, T) where attention depends on positions only, else (B, N_h, T, T), indexed [..., q, k] with pixels in
        row-major order.
        """
        x = self.embed(x)
        maps = []
        for block in self.blocks:
            maps.append(block.attn.probabilities(x))
            x = block(x)
        return maps

    @torch.jit.ignore
    def set_input_size(self, img_size: ImageSize) -> None:
        """Accept images of another size; learned encodings are interpolated into new parameters."""
        self.img_size = self.layout.checked_size(img_size)
        set_grids(self.blocks, self.layout.grids(self.img_size))

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Initialize all parameters again: score terms by their own rules, all others as in PyTorch."""
        modules = list(self.modules())
        for module in reversed(modules):  # a module's values for its children come last
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()


class SANet(AttentionNetwork):
    """Self-attention network for images; the defaults are the paper's CIFAR models.

    Args:
        terms: classes of score terms (terms.py).
        patch_size: side of a token's square of pixels, P.
        embed_dim, depth, num_heads, hidden_dim: D, number of blocks, N_h, width of the feed-forward layers.
        global_pool: "avg" or "" (none: the head is applied to every pixel).
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: dropout before the head, after every pair of
            linear layers, on the attention probabilities, and of whole residual branches (the last block's rate).

    Raises:
        ValueError: for sizes other than positive whole numbers, an unknown `global_pool`, or an `img_size` that the
            tokens do not tile.
    """

    block_class: type[PostNormBlock] = PostNormBlock

    def __init__(
        self,
        terms: Terms,
        img_size: ImageSize = 32,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "avg",
        patch_size: int = 2,
        embed_dim: int = 400,
        depth: int = 6,
        num_heads: int = 9,
        hidden_dim: int = 512,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {
            "patch_size": patch_size,
            "embed_dim": embed_dim,
            "depth": depth,
            "num_heads": num_heads,
            "hidden_dim": hidden_dim,
        }
        layout = self.layout_of(**sizes)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        # Space-to-depth and a linear map in one: the stride is the kernel size.
        patch_embed = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size, **dd)
        blocks = [
            self.block_class(
                embed_dim,
                num_heads,
                hidden_dim,
                terms,
                grid,
                proj_drop=proj_drop_rate,
                attn_drop=attn_drop_rate,
                drop_path=drop_path_rate * index / max(depth - 1, 1),
                **dd,
            )
            for index, grid in enumerate(layout.grids(layout.checked_size(img_size)))
        ]
        super().__init__(
            patch_embed, blocks, layout, img_size, num_classes, global_pool, drop_rate, **dd
        )
        self.sizes = sizes

    @staticmethod
    def layout_of(
        patch_size: int, embed_dim: int, depth: int, num_heads: int, hidden_dim: int
    ) -> Layout:
        """Tokens of one size, and a level of features per block. Raises ValueError for impossible sizes."""
        check_positive(patch_size=patch_size, embed_dim=embed_dim, depth=depth)
        check_positive(num_heads=num_heads, hidden_dim=hidden_dim)
        levels = [Level(blocks, embed_dim, patch_size) for blocks in range(1, depth + 1)]
        return Layout([patch_size] * (depth + 1), levels)


def new_head(dim: int, num_classes: int | None, **dd: Any) -> nn.Linear | nn.Identity:
    """The linear map from features to logits; none for 0 classes."""
    return nn.Linear(dim, num_classes, **dd) if num_classes else nn.Identity()


def checked_pool(global_pool: str) -> str:
    if global_pool not in ("avg", ""):
        raise ValueError(f"global_pool: got {global_pool!r}, expected 'avg' or '' (no pooling)")
    return global_pool


def terms_in(network: nn.Module) -> dict[str, Term]:
    """All score terms of a network, by path."""
    modules = network.named_modules()
    return {path: module for path, module in modules if isinstance(module, Term)}


def attention_in(blocks: nn.Module) -> dict[str, Attention]:
    """All layers of attention of a network's blocks, by path, in order of evaluation."""
    modules = blocks.named_modules()
    return {path: module for path, module in modules if isinstance(module, Attention)}


def block_of(path: str) -> int:
    """The block number in a path relative to a network's `blocks`."""
    return int(path.partition(".")[0])


def set_grids(blocks: nn.Module, grids: Sequence[Grid]) -> None:
    """Set the grid of (H, W) pixels of each block's attention."""
    for path, layer in attention_in(blocks).items():
        layer.set_grid(grids[block_of(path)])
