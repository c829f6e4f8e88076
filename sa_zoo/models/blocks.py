"""The blocks of the networks: the paper's, and those of a CNN with attention in the place of its convolutions.

Everything has the layout (B, H, W, D). Legend: attention.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, max_pool2d

from .attention import Attention
from .norm import BatchNorm
from .stages import Grid, Layout, Stage
from .terms import Groups, Terms


class DropPath(nn.Dropout):
    """Drops the residual branches of whole images in training: (B, H, W, D) -> (B, H, W, D)"""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return x * dropout(x.new_ones(x.shape[0], 1, 1, 1), self.p)


class MaxPool(nn.Module):
    """Max-pooling of stride 2; a last row or column without a partner is dropped: (B, H_in, W_in, D) -> (B, H, W, D)"""

    def forward(self, x: Tensor) -> Tensor:
        return max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


class Block(nn.Module):
    """Attention: `attended`, then `rest`."""

    attention_class: type[Attention] = Attention

    def __init__(
        self,
        stage: Stage,
        terms: Terms,
        grid: Grid,
        dim_in: int,
        pools: bool = False,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.attn: Any  # of `add_layers`
        sizes = (dim_in, stage.num_heads, terms, grid, stage.dim)
        attention = partial(self.attention_class, *sizes, attn_drop=attn_drop, **dd)
        self.add_layers(stage, attention, pools, dd)
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path)

    def add_layers(
        self, stage: Stage, attention: Callable[..., Attention], pools: bool, dd: dict[str, Any]
    ) -> None:
        """Add attention and other layers; `pools` is True in the first block of a stage of a plain network."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, D), or (B, 2 H, 2 W, D_in) if it pools -> (B, H, W, D)"""
        return self.rest(x, self.attended(x))

    def attended(self, x: Tensor) -> Tensor:
        """Attention, and pooling if there is any: as `forward`."""
        return self.attn(x)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual connection and later layers: the block's input, and (B, H, W, D) -> (B, H, W, D)"""
        raise NotImplementedError


class PostNormBlock(Block):
    """The paper's block: LayerNorm(x + attention(x)), then LayerNorm(x + W_2 GELU(W_1 x))."""

    def add_layers(
        self, stage: Stage, attention: Callable[..., Attention], pools: bool, dd: dict[str, Any]
    ) -> None:
        self.attn = attention()
        self.norm1 = nn.LayerNorm(stage.dim, eps=1e-12, **dd)
        self.fc1 = nn.Linear(stage.dim, stage.hidden_dim, **dd)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(stage.hidden_dim, stage.dim, **dd)
        self.norm2 = nn.LayerNorm(stage.dim, eps=1e-12, **dd)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.drop(attended)))
        fed = self.fc2(self.act(self.fc1(x)))
        return self.norm2(x + self.drop_path(self.drop(fed)))


@torch.no_grad()
def start_as_identity(layer: Attention) -> None:
    """Set rows of W_val so that as many channels as possible are those of the input, in the middle one of the heads."""
    slices = layer.W_val.weight.unflatten(1, [layer.num_heads, -1])
    dim_out, num_heads, dim_in = slices.shape
    same = min(dim_in, dim_out)
    slices[:same] = 0.0
    slices[:same, num_heads // 2].fill_diagonal_(1.0)


class PlainBlock(Block):
    """GELU(BatchNorm(attention(x))), after Jordan's CNN (airbench, 2024).

    In the first block of a stage, max-pooling follows attention, which still sees every pixel. Attention starts as the
    identity (`start_as_identity`).
    """

    def add_layers(
        self, stage: Stage, attention: Callable[..., Attention], pools: bool, dd: dict[str, Any]
    ) -> None:
        self.attn = attention(W_out=nn.Identity if pools else BatchNorm)
        self.merge: nn.Module = nn.Identity()
        if pools:
            self.merge = nn.Sequential(MaxPool(), BatchNorm(stage.dim, **dd))
        self.act = nn.GELU()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set rows of W_val; `init_weights` does so after it has reset all of them."""
        start_as_identity(self.attn)

    def attended(self, x: Tensor) -> Tensor:
        return self.merge(self.attn(x))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.act(self.drop(attended))


BlockClasses = tuple[type[PostNormBlock], type[PlainBlock]]


def terms_of_block(terms: Groups, index: int, depth: int) -> Terms:
    """The group of score terms of a block; the `depth` blocks are divided equally among the groups."""
    return terms[index * len(terms) // depth]


def new_blocks(
    classes: BlockClasses,
    layout: Layout,
    terms: Groups,
    img_size: Sequence[int],
    dim_in: int,
    drop_path_rate: float,
    **same: Any,
) -> list[Block]:
    """The blocks of a network for tokens of `dim_in` channels.

    Raises ValueError for a `drop_path_rate` in plain networks, which have no residual branches.
    """
    if layout.plain and drop_path_rate:
        raise ValueError(f"drop_path_rate: got {drop_path_rate}, expected 0 in plain networks")
    block_class = classes[layout.plain]
    grids = layout.grids(img_size)
    depth = len(grids)
    blocks: list[Block] = []
    for stage in layout.stages:
        for inside in range(stage.depth):
            index = len(blocks)
            group = terms_of_block(terms, index, depth)
            rate = drop_path_rate * index / max(depth - 1, 1)
            pools = layout.plain and inside == 0
            sizes = (stage, group, grids[index], dim_in, pools)
            blocks.append(block_class(*sizes, drop_path=rate, **same))
            dim_in = stage.dim
    return blocks
