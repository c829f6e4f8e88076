"""A plain network: no residual connections and no feed-forward layers, after Keller Jordan's CNN (airbench, 2024).

Attention replaces its convolutions, with heads that start as 3x3 kernels (Theorem 1). Images pass a convolution and
stages, each with half the tokens per axis of the one before. Legend: attention.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool2d
from torch.types import Device

from .attention import Attention
from .blocks import Block
from .layout import Grid, ImageSize, Layout, Level, check_positive
from .network import AttentionNetwork
from .norm import BatchNorm
from .terms import Quadratic

PerStage = int | Sequence[int]  # one number for all stages, or one per stage


class Stage(NamedTuple):
    """Blocks of one size: D, their number, N_h."""

    embed_dim: Any
    depth: Any
    num_heads: Any


class PlainStem(nn.Conv2d):
    """GELU(convolution) without padding: images (B, C, H, W) -> (B, 6 (P + 1)^2, (H - 1) // P, (W - 1) // P)

    The kernel reads one row and column more than a patch of P x P pixels. There are as many filters as eigenvectors of
    such squares in three colors, and their negatives (Jordan 2024).
    """

    def __init__(self, in_chans: int, patch_size: int, **dd: Any) -> None:
        kernel = patch_size + 1
        super().__init__(in_chans, 6 * kernel**2, kernel, patch_size, **dd)

    def forward(self, x: Tensor) -> Tensor:
        # `super` is unknown to TorchScript
        return gelu(self._conv_forward(x, self.weight, self.bias))


class MaxPool(nn.Module):
    """Max-pooling of stride 2; a last row or column without a partner is dropped: (B, H_in, W_in, D) -> (B, H, W, D)"""

    def forward(self, x: Tensor) -> Tensor:
        return max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


class PlainBlock(Block):
    """GELU(BatchNorm(attention(x))).

    In the first block of a stage, max-pooling follows attention, which reads the tokens before it. Heads start as the
    pixels of a kernel, and attention as the identity (`start_as_identity`).
    """

    def __init__(
        self,
        dim_in: int,
        dim: int,
        num_heads: int,
        grid: Grid,
        pools: bool,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        **dd: Any,
    ) -> None:
        W_out = nn.Identity if pools else BatchNorm
        sizes = (dim_in, num_heads, (Quadratic,), grid, dim)
        super().__init__(self.attention_class(*sizes, W_out=W_out, attn_drop=attn_drop, **dd))
        self.merge: nn.Module = nn.Identity()
        if pools:
            self.merge = nn.Sequential(MaxPool(), BatchNorm(dim, **dd))
        self.act = nn.GELU()
        self.drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set heads and rows of W_val; `init_weights` calls it after it has reset both."""
        self.attn.terms[0].start_as_kernel()
        start_as_identity(self.attn)

    def after_attention(self, x: Tensor, Y: Tensor) -> Tensor:
        return self.act(self.drop(self.merge(Y)))


@torch.no_grad()
def start_as_identity(layer: Attention) -> None:
    """Initialize W_val so that the middle head copies the channels of its input, as many as there are."""
    kernel = layer.W_val.weight.unflatten(1, [layer.num_heads, -1])
    dim_out, num_heads, dim_in = kernel.shape
    same = min(dim_in, dim_out)
    kernel[:same] = 0.0
    kernel[:same, num_heads // 2].fill_diagonal_(1.0)


class PlainNet(AttentionNetwork):
    """Plain network for images. Arguments and errors are those of SANet, except:

    terms: none; the heads of all blocks are Quadratic.
    embed_dim, depth, num_heads: one number per stage, or one for all; `depth` has one per stage.
    patch_size: distance of the stem's kernels. Tokens of the first stage's output are twice as far apart.
    """

    block_class: type[PlainBlock] = PlainBlock

    def __init__(
        self,
        img_size: ImageSize = 32,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "avg",
        patch_size: int = 1,
        embed_dim: PerStage = (160, 640, 640),
        depth: PerStage = (2, 2, 2),
        num_heads: PerStage = 9,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        stages = stages_of(embed_dim, depth, num_heads)
        sizes: dict[str, Any] = {
            "patch_size": patch_size,
            "embed_dim": embed_dim,
            "depth": depth,
            "num_heads": num_heads,
        }
        layout = self.layout_of(**sizes)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        patch_embed = PlainStem(in_chans, patch_size, **dd)
        grids = layout.grids(layout.checked_size(img_size))
        blocks: list[Block] = []
        dim_in = patch_embed.out_channels
        for stage in stages:
            for inside in range(stage.depth):
                block = self.block_class(
                    dim_in,
                    stage.embed_dim,
                    stage.num_heads,
                    grids[len(blocks)],
                    pools=inside == 0,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    **dd,
                )
                blocks.append(block)
                dim_in = stage.embed_dim
        super().__init__(
            patch_embed, blocks, layout, img_size, num_classes, global_pool, drop_rate, **dd
        )
        self.sizes = sizes

    @staticmethod
    def layout_of(
        patch_size: int, embed_dim: PerStage, depth: PerStage, num_heads: PerStage
    ) -> Layout:
        """Tokens twice as large after each stage's first block, and a level of features per stage.

        Raises ValueError for impossible sizes.
        """
        check_positive(patch_size=patch_size)
        stages = stages_of(embed_dim, depth, num_heads)
        sides = [patch_size]
        levels = []
        for stage in stages:
            side = 2 * sides[-1]
            sides += [side] * stage.depth
            levels.append(Level(len(sides) - 1, stage.embed_dim, side))
        return Layout(sides, levels, margin=1)


def stages_of(embed_dim: PerStage, depth: PerStage, num_heads: PerStage) -> list[Stage]:
    """One stage per number of `depth`. Raises ValueError for anything but positive whole numbers that fit."""
    given = Stage(embed_dim, depth, num_heads)
    count = len(depth) if isinstance(depth, list | tuple) else 1
    columns = [size if isinstance(size, list | tuple) else [size] * count for size in given]
    if not count or any(len(column) != count for column in columns):
        raise ValueError(f"sizes: got {given}, expected one number per stage, or one for all")
    stages = [Stage(*sizes) for sizes in zip(*columns, strict=True)]
    for stage in stages:
        check_positive(**stage._asdict())
    return stages
