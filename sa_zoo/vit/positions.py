"""The paper's quadratic score in plain vision transformers, as four more channels of queries and keys.

    score_h[q, k] = q . k / sqrt(d) - alpha_h |k - q - Delta_h|^2     for pixels q and k

and q . k / sqrt(d) where q or k is a class or register token: its score is content alone, like that of a pixel exactly
at Delta_h. With t = q + Delta_h, the second term is the dot product of

    queries alpha (2 t_y, 2 t_x, -|t|^2, -1)    and    keys (k_y, k_x, 1, |k|^2)

so scaled_dot_product_attention computes it without a tensor of T x T scores. Positions count from the middle of the
grid. In bfloat16 and float16 there are eight channels, four of them for rounding errors: of the query's first three and
of |k|^2; alpha is rounded, like any weight. With four or eight, fast kernels still accept the width of a head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, maybe_add_mask, resolve_self_attn_mask
from timm.models import register_notrace_function
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sa_zoo.models.positions import at_least_float32, outer_sum, pixels, quadratic_scores
from sa_zoo.vit.layers import (
    attentions,
    follow_input_size,
    grid_of,
    kernel_pixels,
    places,
    projected,
)

NAME = {"architecture": "local_vit", "tag": None}  # of these networks for timm; timm_vits.py


class PositionAttention(nn.Module):
    """timm's attention with quadratic scores: (B, N, D) -> (B, N, D). Its parameters keep their names.

    Delta is one vector, (2 N_h,), because optimizers of timm decay, and orthogonalize, matrices.

    Args:
        attention: timm's; its modules are taken over.
        grid: (H, W) of the pixels.
        prefix: number of class and register tokens, which come first.
        Delta: (N_h, 2), (row, column) in pixels.
        alpha: initial sharpness of all heads, per squared pixel.
    """

    positional_parameters = ("Delta", "alpha")
    quarters: Tensor
    attn_drop: nn.Dropout
    norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Dropout

    def __init__(
        self,
        attention: Attention | AttentionRope,
        grid: tuple[int, int],
        prefix: int,
        Delta: Tensor,
        alpha: float,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.num_heads = attention.num_heads
        self.head_dim = attention.head_dim
        self.scale = attention.scale
        self.fused_attn = attention.fused_attn
        self.rotate_half = getattr(attention, "rotate_half", False)
        for name, module in attention.named_children():
            self.add_module(name, module)
        weight = attention.qkv.weight
        self.Delta = nn.Parameter(Delta.flatten().to(weight))
        self.alpha = nn.Parameter(weight.new_full([self.num_heads], alpha))
        self.set_grid(grid)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Expect (H, W) pixels."""
        self.grid = grid
        at = places(grid, self.Delta.device)
        squares = at.square().sum(dim=1, keepdim=True)
        keys = torch.cat([at, torch.ones_like(squares), squares], dim=1)  # k_y, k_x, 1, |k|^2
        # whole numbers: they stay exact when the network changes its type
        self.register_buffer("quarters", (4 * keys).int(), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Fill buffers missing in files, for libraries that build networks without memory."""
        self.set_grid(self.grid)

    def query_channels(self, at: Tensor) -> Tensor:
        """(2 t_y, 2 t_x, -|t|^2, -1), from the pixels (T, 2): (N_h, T, 4)"""
        t = at + at_least_float32(self.Delta).unflatten(0, [self.num_heads, 1, 2])
        channels = torch.cat([2 * t, -t.square().sum(dim=-1, keepdim=True)], dim=-1)
        return F.pad(channels, [0, 1], value=-1.0)

    def positioned(self, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their positions, and values: (B, N_h, N, d + 4 or 8) twice and (B, N_h, N, d)"""
        q, k, v = projected(self, x, rope)
        # scaled_dot_product_attention multiplies the scores by the scale
        alpha = at_least_float32((self.alpha / self.scale).to(v.dtype))[:, None, None]
        keys = self.quarters / 4
        queries = alpha * self.query_channels(keys[:, :2])
        q = self._with_channels(q, in_parts(queries, v, slice(3)))
        k = self._with_channels(k, in_parts(keys, v, slice(3, 4)))
        return q, k, v

    def position_scores(self) -> Tensor:
        """-alpha_h |k - q - Delta_h|^2, and zeros for class and register tokens: (N_h, N, N)"""
        centers = self.Delta.unflatten(0, [-1, 2])
        down, across = (pixels(size, centers.device) for size in self.grid)
        scores = outer_sum(
            quadratic_scores(centers[:, 0], self.alpha, down, down),
            quadratic_scores(centers[:, 1], self.alpha, across, across),
        )
        return F.pad(scores, [self.prefix, 0, self.prefix, 0])

    def _with_channels(self, x: Tensor, channels: Tensor) -> Tensor:
        """Append channels of pixels, or zeros for class and register tokens: (B, N_h, N, d), (.., T, 4 or 8)"""
        of_tokens = F.pad(channels, [0, 0, self.prefix, 0])
        return torch.cat([x, of_tokens.expand(x.shape[0], x.shape[1], -1, -1)], dim=-1)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
    ) -> Tensor:
        if self.fused_attn:
            q, k, v = self.positioned(x, rope)
            # The fast kernels need values as wide as queries.
            heads = F.scaled_dot_product_attention(
                q,
                k,
                F.pad(v, [0, q.shape[-1] - self.head_dim]),
                attn_mask=attn_mask,
                dropout_p=self.attn_drop.p if self.training else 0.0,
                is_causal=is_causal,
                scale=self.scale,
            )[..., : self.head_dim]
        else:
            q, k, v = projected(self, x, rope)
            scores = self.scale * q @ k.mT
            scores = scores + self.position_scores().to(scores.dtype)
            bias = resolve_self_attn_mask(x.shape[1], scores, attn_mask, is_causal)
            P = maybe_add_mask(scores, bias).softmax(dim=-1)
            heads = self.attn_drop(P) @ v
        return self.proj_drop(self.proj(self.norm(heads.transpose(1, 2).flatten(2))))


@register_notrace_function
def in_parts(x: Tensor, like: Tensor, rounded: slice) -> Tensor:
    """Channels in the type of another tensor, twice if that is narrow: (.., 4) -> (.., 4 or 8)

    The second time, those in `rounded` are rounding errors. Errors of queries multiply rounded keys, and vice versa.
    """
    high = x.to(like.dtype)
    if like.dtype.itemsize >= 4:
        return high
    second = high.clone()
    second[..., rounded] = (x - high)[..., rounded].to(like.dtype)
    return torch.cat([high, second], dim=-1)


def add_positions(
    vit: VisionTransformer | Eva,
    alpha: float = 1.0,
    blocks: list[int] | None = None,
) -> VisionTransformer | Eva:
    """Give the attention of a VisionTransformer of timm, also one with rotary embeddings, learned scores, in place.

    Heads start at the pixels of a kernel, nearest to the middle first.

    All images have one size; timm's `set_input_size` changes it. Delta and alpha are in units of patches.

    Args:
        vit: new or trained, with or without position embedding, class and register tokens.
        alpha: initial sharpness, per squared pixel of the grid of patches. With 0, a trained network keeps its
            function, up to rounding.
        blocks: those to change, by default all.

    Returns the same network; `Delta` and `alpha` train with all other parameters.
    Raises ValueError for a network other than timm's plain ones, and for arguments that do not fit.
    """
    layers = attentions(vit)
    grid = grid_of(vit)
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha: got {alpha}, expected a number from 0")
    if not isinstance(vit.patch_drop, nn.Identity | None):
        raise ValueError(
            "vit: got patch_drop_rate > 0, expected 0: positions are those of all patches"
        )
    chosen = range(len(layers)) if blocks is None else sorted(set(blocks))
    if not chosen or not set(chosen) <= set(range(len(layers))):
        raise ValueError(f"blocks: got {blocks}, expected numbers from 0 to {len(layers) - 1}")
    network: Any = vit
    for number in chosen:
        layer = layers[number]
        Delta = kernel_pixels(grid, layer.num_heads)
        network.blocks[number].attn = PositionAttention(
            layer, grid, vit.num_prefix_tokens, Delta, alpha
        )
    follow_input_size(vit)
    cfg = getattr(vit, "pretrained_cfg", None)
    if cfg is not None:  # timm writes it into config.json
        given = {"vit": cfg["architecture"]} | getattr(vit, "_model_args", {})
        network._model_args = given | {"alpha": alpha, "blocks": blocks}
        network.pretrained_cfg = cfg | NAME
    return vit
