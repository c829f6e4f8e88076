"""The paper's block, and the base of all blocks. Tokens have the layout (B, H, W, D). Legend: attention.py."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout

from .attention import Attention
from .layout import Grid
from .norm import LayerNorm
from .terms import Terms


class DropPath(nn.Dropout):
    """Drops the residual branches of whole images in training: (B, H, W, D) -> (B, H, W, D)"""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return x * dropout(x.new_ones(x.shape[0], 1, 1, 1), self.p)


class Block(nn.Module):
    """Base of all blocks: attention, then `after_attention`."""

    attention_class: type[Attention] = Attention

    def __init__(self, attn: Attention) -> None:
        super().__init__()
        self.attn: Any = attn

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, D_in) -> (B, H', W', D)"""
        return self.after_attention(x, self.attn(x))

    def after_attention(self, x: Tensor, Y: Tensor) -> Tensor:
        """The block's input (B, H, W, D_in) and the output of its attention (B, H, W, D) -> (B, H', W', D)"""
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
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        **dd: Any,
    ) -> None:
        attn = self.attention_class(dim, num_heads, terms, grid, attn_drop=attn_drop, **dd)
        super().__init__(attn)
        self.norm1 = LayerNorm(dim, eps=1e-12, **dd)
        self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim, **dd)
        self.norm2 = LayerNorm(dim, eps=1e-12, **dd)
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path)

    def after_attention(self, x: Tensor, Y: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.drop(Y)))
        Y = self.fc2(self.act(self.fc1(x)))
        return self.norm2(x + self.drop_path(self.drop(Y)))
