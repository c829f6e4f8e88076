"""The two blocks that networks are made of: the paper's, and a ResNet's with attention for its convolutions.

Everything has the layout (B, H, W, D). Legend: attention.py.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout

from .attention import Attention
from .stages import Grid, Layout
from .terms import Groups, Terms


class DropPath(nn.Dropout):
    """Drops the residual branches of whole images in training: (B, H, W, D) -> (B, H, W, D)"""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return x * dropout(x.new_ones(x.shape[0], 1, 1, 1), self.p)


class Merge(nn.Module):
    """2x2 space-to-depth and a linear map: (B, 2 H, 2 W, D_in) -> (B, H, W, D)"""

    def __init__(self, dim_in: int, dim: int, **dd: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * dim_in, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        squares = x.unflatten(2, [-1, 2]).unflatten(1, [-1, 2])  # (B, H, 2, W, 2, D_in)
        return self.linear(squares.transpose(2, 3).flatten(3))


class Block(nn.Module):
    """Attention with a residual connection: `attended`, then `rest`.

    The first block of a further stage merges 2x2 pixels of `dim_in` channels before that.
    """

    attention_class: type[Attention] = Attention

    def __init__(
        self,
        dim: int,
        dim_in: int | None = None,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.merge = nn.Identity() if dim_in is None else Merge(dim_in, dim, **dd)
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, D), or (B, 2 H, 2 W, D_in) -> (B, H, W, D)"""
        x = self.merge(x)
        return self.after_attention(x, self.attended(x))

    def attended(self, x: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        raise NotImplementedError

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual connection and what follows it: (B, H, W, D), twice -> (B, H, W, D)"""
        raise NotImplementedError

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """`rest`. A hook as Attention.evaluator, because a few images at a time can be faster."""
        return self.rest(x, attended)

    def attention_maps(self, x: Tensor) -> list[Tensor]:
        """The probabilities of each layer of attention, for the block's input."""
        raise NotImplementedError


class PostNormBlock(Block):
    """The paper's block: LayerNorm(x + attention(x)), then LayerNorm(x + W_2 GELU(W_1 x))."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        terms: Terms,
        grid: Grid,
        dim_in: int | None = None,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        **dd: Any,
    ) -> None:
        super().__init__(dim, dim_in, proj_drop, drop_path, **dd)
        self.attn = self.attention_class(dim, num_heads, terms, grid, False, attn_drop, **dd)
        self.norm1 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim, **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-12, **dd)

    def attended(self, x: Tensor) -> Tensor:
        return self.attn(x)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.drop(attended)))
        fed = self.fc2(self.act(self.fc1(x)))
        return self.norm2(x + self.drop_path(self.drop(fed)))

    def attention_maps(self, x: Tensor) -> list[Tensor]:
        return [self.attn.probabilities(self.merge(x))]


class ResidualBlock(Block):
    """GELU(x + BatchNorm(attention(GELU(BatchNorm(attention(x)))))): after He et al. (2016), for convolutions."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        terms: Terms,
        grid: Grid,
        dim_in: int | None = None,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        **dd: Any,
    ) -> None:
        super().__init__(dim, dim_in, proj_drop, drop_path, **dd)
        first = self.attention_class(dim, num_heads, terms, grid, True, attn_drop, **dd)
        self.first: Any = nn.Sequential(OrderedDict(attn=first, act=nn.GELU()))
        self.attn = self.attention_class(dim, num_heads, terms, grid, True, attn_drop, **dd)
        self.act = nn.GELU()

    def attended(self, x: Tensor) -> Tensor:
        return self.attn(self.first(x))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.act(x + self.drop_path(self.drop(attended)))

    def attention_maps(self, x: Tensor) -> list[Tensor]:
        x = self.merge(x)
        return [self.first.attn.probabilities(x), self.attn.probabilities(self.first(x))]


BlockClasses = tuple[type[PostNormBlock], type[ResidualBlock]]


def terms_of_block(terms: Groups, index: int, depth: int) -> Terms:
    """The group of score terms of a block; the `depth` blocks are divided equally among the groups."""
    return terms[index * len(terms) // depth]


def new_blocks(
    classes: BlockClasses,
    layout: Layout,
    terms: Groups,
    img_size: Sequence[int],
    drop_path_rate: float,
    **same: Any,
) -> list[Block]:
    """The blocks of a network: PostNormBlock in stages with feed-forward layers, ResidualBlock in those without."""
    post_norm, residual = classes
    grids = layout.grids(img_size)
    depth = len(grids)
    blocks: list[Block] = []
    dim_in = None
    for stage in layout.stages:
        for _ in range(stage.depth):
            index = len(blocks)
            own = same | {
                "terms": terms_of_block(terms, index, depth),
                "grid": grids[index],
                "dim_in": dim_in,
                "drop_path": drop_path_rate * index / max(depth - 1, 1),
            }
            if stage.hidden_dim:
                blocks.append(post_norm(stage.dim, stage.num_heads, stage.hidden_dim, **own))
            else:
                blocks.append(residual(stage.dim, stage.num_heads, **own))
            dim_in = None
        dim_in = stage.dim
    return blocks
