"""The paper's network (Section 4): 2x2 space-to-depth and a linear map, blocks of attention, mean over pixels.

Pure torch: the timm and transformers interfaces are built on it. Everything between the embedding and the head has
the layout (B, H, W, D).
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.types import Device

from .attention import Attention
from .terms import Grid, Groups, Term, Terms, has_fixed_size

_logger = logging.getLogger(__name__)
ImageSize = int | Sequence[int]  # in pixels: the side of a square, or height and width


class DropPath(nn.Dropout):
    """Drops the residual branches of whole images in training: (B, H, W, D) -> (B, H, W, D)"""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return x * dropout(x.new_ones(x.shape[0], 1, 1, 1), self.p)


class Block(nn.Module):
    """Post-norm block: LayerNorm(x + attention(x)), then LayerNorm(x + W_2 GELU(W_1 x))."""

    attention_class: type[Attention] = Attention

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
        super().__init__()
        self.attn = self.attention_class(dim, num_heads, terms, grid, attn_drop=attn_drop, **dd)
        self.norm1 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim, **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        return self.after_attention(x, self.attn(x))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """From the input and what attention made of it to the output: (B, H, W, D), twice -> (B, H, W, D)"""
        x = self.norm1(x + self.drop_path(self.drop(attended)))
        fed = self.fc2(self.act(self.fc1(x)))
        return self.norm2(x + self.drop_path(self.drop(fed)))

    # What evaluates `rest`: a hook as Attention.evaluator, because a few images at a time can be faster.
    after_attention = rest


class SANet(nn.Module):
    """Self-attention network for images; the defaults are the paper's CIFAR models.

    Args:
        terms: groups of classes of score terms (terms.py); the blocks are divided equally among the groups.
        patch_size: side of the square of pixels that becomes one token, P.
        embed_dim, depth, num_heads, hidden_dim: D, number of blocks, N_h, width of the feed-forward
            layers.
        global_pool: "avg" or "" (none: the head is applied to every pixel).
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: dropout before the head, after every linear
            pair, on the attention probabilities, and of whole residual branches (the last block's rate).

    Raises:
        ValueError: for a size that is no positive whole number, `terms` that are no classes, an unknown
            `global_pool`, or an `img_size` that `patch_size` does not divide.
    """

    block_class: type[Block] = Block

    def __init__(
        self,
        terms: Groups,
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
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        sizes = (in_chans, patch_size, embed_dim, depth, num_heads, hidden_dim)
        check_sizes("in_chans, patch_size, embed_dim, depth, num_heads, hidden_dim", sizes)
        check_terms(terms)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.patch_size = patch_size
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.img_size = checked_size(img_size, patch_size)
        self.global_pool = checked_pool(global_pool)
        # Space to depth, then a linear map: together exactly a convolution whose stride is its kernel.
        self.patch_embed = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size, **dd)
        blocks = [
            self.block_class(
                embed_dim,
                num_heads,
                hidden_dim,
                terms_of_block(terms, index, depth),
                self.expected_grid(),
                proj_drop_rate,
                attn_drop_rate,
                drop_path_rate * index / max(depth - 1, 1),
                **dd,
            )
            for index in range(depth)
        ]
        self.blocks: Any = nn.Sequential(*blocks)
        self.fixed_img_size = has_fixed_size(terms)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = new_head(embed_dim, num_classes, **dd)

    def expected_grid(self) -> Grid:
        """(H, W), in tokens, of the images that the network expects."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    def embed(self, x: Tensor) -> Tensor:
        """Images (B, C, P H, P W) -> tokens (B, H, W, D)"""
        # One assertion per axis: torch.fx cannot trace `and`, and TorchScript accepts only a literal as the message.
        torch._assert(x.dim() == 4, "images: expected four dimensions, (B, C, H, W)")
        height = x.shape[2]
        width = x.shape[3]
        if self.fixed_img_size:
            expected = self.img_size
            torch._assert(
                height == expected[0], "image height: not the model's; call set_input_size"
            )
            torch._assert(width == expected[1], "image width: not the model's; call set_input_size")
        else:
            P = self.patch_size
            torch._assert(height % P == 0, "image height: expected a multiple of the patch size")
            torch._assert(width % P == 0, "image width: expected a multiple of the patch size")
        # Without `contiguous`, every product would copy it.
        return self.patch_embed(x).permute(0, 2, 3, 1).contiguous()

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, C, P H, P W) -> tokens (B, H, W, D)"""
        return self.blocks(self.embed(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, H, W, D) -> logits (B, num_classes), or (B, D) with pre_logits; unpooled if global_pool is ''."""
        if self.global_pool == "avg":
            x = x.mean(dim=(1, 2))  # (B, D)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, P H, P W) -> logits (B, num_classes)"""
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def attention_maps(self, x: Tensor) -> list[Tensor]:
        """The attention probabilities of each block for images (B, C, P H, P W), at least float32.

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
        old = self.img_size
        self.img_size = checked_size(img_size, self.patch_size)
        if self.fixed_img_size and old != self.img_size:
            new = self.img_size
            _logger.warning("learned encodings: interpolated from images of %s to %s", old, new)
            set_grid(self.blocks, self.expected_grid())

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Initialize all parameters again: those of score terms as the terms say, all others as PyTorch does."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()


def check_sizes(names: str, sizes: tuple[int, ...]) -> None:
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"{names}: got {sizes}, expected positive whole numbers")


def check_terms(terms: object) -> None:
    groups = terms if isinstance(terms, tuple) else ()
    for group in groups or [()]:
        classes = group if isinstance(group, tuple) else ()
        if not classes or not all(isinstance(t, type) and issubclass(t, Term) for t in classes):
            expected = "tuples of classes of score terms, such as ((Quadratic,),)"
            raise ValueError(f"terms: got {terms}, expected {expected}")


def terms_of_block(terms: Groups, index: int, depth: int) -> Terms:
    """The group of score terms of a block; the `depth` blocks are divided equally among the groups."""
    return terms[index * len(terms) // depth]


def terms_in(network: nn.Module) -> dict[str, Term]:
    """All score terms of a network, by path."""
    modules = network.named_modules()
    return {path: module for path, module in modules if isinstance(module, Term)}


def set_grid(blocks: nn.Module, grid: Grid) -> None:
    """Interpolate the learned encodings in `blocks` to a grid of (H, W) pixels."""
    for term in terms_in(blocks).values():
        if not term.any_grid:
            term.set_grid(grid)


def new_head(dim: int, num_classes: int | None, **dd: Any) -> nn.Linear | nn.Identity:
    """The linear map from features to logits; none for 0 classes."""
    return nn.Linear(dim, num_classes, **dd) if num_classes else nn.Identity()


def checked_size(img_size: ImageSize, patch_size: int) -> tuple[int, int]:
    """(height, width) of an image that patches of `patch_size` tile."""
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if height % patch_size or width % patch_size or min(height, width) < patch_size:
        raise ValueError(
            f"img_size: got {height}x{width}, expected positive multiples of the patch size {patch_size}"
        )
    return height, width


def checked_pool(global_pool: str) -> str:
    if global_pool not in ("avg", ""):
        raise ValueError(f"global_pool: got {global_pool!r}, expected 'avg' or '' (no pooling)")
    return global_pool
