"""The paper's network (Section 4): 2x2 space-to-depth and a linear map, blocks of attention, mean over pixels.

The paper's has one stage. In a pyramid, each further stage begins as the first one does, with space-to-depth and a
linear map. Pure torch: the timm and transformers interfaces are built on it. Everything between the embedding and the
head has the layout (B, H, W, D).
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.types import Device

from .attention import Attention
from .stages import Grid, ImageSize, Layout, Sizes, layout_of
from .terms import Groups, Term, Terms, has_fixed_size

_logger = logging.getLogger(__name__)


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
        # By the sizes of x: with `unflatten`, torch's older exporter to ONNX fixes the number of images.
        B, height, width, D_in = x.shape
        squares = x.reshape(B, height // 2, 2, width // 2, 2, D_in)
        return self.linear(squares.transpose(2, 3).flatten(3))


class Layer(nn.Module):
    """A layer of a CNN with attention in the place of its convolution: GELU(BatchNorm(attention(x)))."""

    def __init__(self, attn: Attention) -> None:
        super().__init__()
        self.attn = attn
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        return self.act(self.attn(x))


class Block(nn.Module):
    """Post-norm block: LayerNorm(x + attention(x)), then LayerNorm(x + W_2 GELU(W_1 x)).

    Without feed-forward layers, `hidden_dim` 0, it is the residual block of two layers of He et al. (2016), with
    attention in the place of convolutions: GELU(x + BatchNorm(attention(GELU(BatchNorm(attention(x)))))).
    One that begins a further stage merges 2x2 pixels of `dim_in` channels first.
    """

    attention_class: type[Attention] = Attention
    feeds_forward: Final[bool]

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
        super().__init__()
        self.merge: Merge | nn.Identity = (
            nn.Identity() if dim_in is None else Merge(dim_in, dim, **dd)
        )
        self.feeds_forward = hidden_dim > 0

        def attention() -> Attention:
            norm = not self.feeds_forward
            return self.attention_class(dim, num_heads, terms, grid, norm, attn_drop, **dd)

        self.first: Layer | nn.Identity = (
            nn.Identity() if self.feeds_forward else Layer(attention())
        )
        self.attn = attention()
        if self.feeds_forward:
            self.norm1 = nn.LayerNorm(dim, eps=1e-12, **dd)
            self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.act = nn.GELU()
        if self.feeds_forward:
            self.fc2 = nn.Linear(hidden_dim, dim, **dd)
            self.norm2 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, D), or (B, 2 H, 2 W, D_in) -> (B, H, W, D)"""
        x = self.merge(x)
        return self.after_attention(x, self.attn(self.first(x)))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """From the input and what attention made of it to the output: (B, H, W, D), twice -> (B, H, W, D)"""
        x = x + self.drop_path(self.drop(attended))
        if not self.feeds_forward:
            return self.act(x)
        x = self.norm1(x)
        fed = self.fc2(self.act(self.fc1(x)))
        return self.norm2(x + self.drop_path(self.drop(fed)))

    # What evaluates `rest`: a hook as Attention.evaluator, because a few images at a time can be faster.
    after_attention = rest


class SANet(nn.Module):
    """Self-attention network for images; the defaults are the paper's CIFAR models.

    Args:
        terms: groups of classes of score terms (terms.py); the blocks are divided equally among the groups.
        patch_size: side of the square of pixels that becomes one token, P.
        patch_overlap: pixels on each side of the square that its token reads, too.
        embed_dim, depth, num_heads, hidden_dim: D, number of blocks, N_h, width of the feed-forward
            layers, or 0 for the blocks of a ResNet (Block). A pyramid has one stage per number of
            `depth`; the others are one number per stage or for all.
        global_pool: "avg" or "" (none: the head is applied to every pixel).
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: dropout before the head, after every linear
            pair, on the attention probabilities, and of whole residual branches (the last block's rate).

    Raises:
        ValueError: for a size that is no positive whole number, `terms` that are no classes, an unknown
            `global_pool`, or an `img_size` that is not a multiple of `patch_size`, and of twice as much for each
            further stage.
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
        patch_overlap: int = 0,
        embed_dim: Sizes = 400,
        depth: Sizes = 6,
        num_heads: Sizes = 9,
        hidden_dim: Sizes = 512,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        check_terms(terms)
        self.layout = layout_of(patch_size, embed_dim, depth, num_heads, hidden_dim)
        self.in_chans = checked_channels(in_chans)
        self.num_classes = num_classes
        self.patch_size = patch_size
        self.patch_overlap = patch_overlap
        self.reduction = self.layout.reductions[-1]
        self.num_features = self.head_hidden_size = self.embed_dim = self.layout.stages[-1].dim
        self.img_size = self.layout.checked_size(img_size)
        self.global_pool = checked_pool(global_pool)
        self.patch_embed = new_embedding(
            in_chans, self.layout.stages[0].dim, patch_size, patch_overlap, **dd
        )
        blocks = [
            self.block_class(**each, proj_drop=proj_drop_rate, attn_drop=attn_drop_rate, **dd)
            for each in block_arguments(self.layout, terms, self.img_size, drop_path_rate)
        ]
        self.blocks: Any = nn.Sequential(*blocks)
        self.fixed_img_size = has_fixed_size(terms)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = new_head(self.num_features, num_classes, **dd)

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
            R = self.reduction
            torch._assert(height % R == 0, "image height: expected a multiple of model.reduction")
            torch._assert(width % R == 0, "image width: expected a multiple of model.reduction")
        # Without `contiguous`, every product would copy it.
        return self.patch_embed(x).permute(0, 2, 3, 1).contiguous()

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, C, R H, R W) -> tokens (B, H, W, D) of the last stage, with R the `reduction`"""
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
            merged = block.merge(x)
            if isinstance(block.first, Layer):
                maps.append(block.first.attn.probabilities(merged))
            maps.append(block.attn.probabilities(block.first(merged)))
            x = block(x)
        return maps

    @torch.jit.ignore
    def set_input_size(self, img_size: ImageSize) -> None:
        """Accept images of another size; learned encodings are interpolated into new parameters."""
        old = self.img_size
        new = self.layout.checked_size(img_size)
        self.img_size = new
        if self.fixed_img_size and old != new:
            _logger.warning("learned encodings: interpolated from images of %s to %s", old, new)
            set_grids(self.blocks, self.layout.grids(new))

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Initialize all parameters again: those of score terms as the terms say, all others as PyTorch does."""
        for module in reversed(
            list(self.modules())
        ):  # what a module sets in its children comes last
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()


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


def block_arguments(
    layout: Layout, terms: Groups, img_size: Sequence[int], drop_path_rate: float
) -> Iterator[dict[str, Any]]:
    """The arguments that distinguish the blocks of a network."""
    grids = layout.grids(img_size)
    index = 0
    dim = None
    for stage in layout.stages:
        for position in range(stage.depth):
            yield {
                "dim": stage.dim,
                "num_heads": stage.num_heads,
                "hidden_dim": stage.hidden_dim,
                "terms": terms_of_block(terms, index, len(grids)),
                "grid": grids[index],
                "dim_in": None if position else dim,
                "drop_path": drop_path_rate * index / max(len(grids) - 1, 1),
            }
            index += 1
        dim = stage.dim


def terms_in(network: nn.Module) -> dict[str, Term]:
    """All score terms of a network, by path."""
    modules = network.named_modules()
    return {path: module for path, module in modules if isinstance(module, Term)}


def attention_in(blocks: nn.Module) -> dict[str, Attention]:
    """All layers of attention of a network's blocks, by path, in the order in which they run."""
    modules = blocks.named_modules()
    return {path: module for path, module in modules if isinstance(module, Attention)}


def block_of(path: str) -> int:
    """The number of the block that a path from a network's `blocks` leads into."""
    return int(path.partition(".")[0])


def set_grids(blocks: nn.Module, grids: Sequence[Grid]) -> None:
    """Interpolate the learned encodings of each block to its grid of (H, W) pixels."""
    for path, term in terms_in(blocks).items():
        if not term.any_grid:
            term.set_grid(grids[block_of(path)])


def new_embedding(in_chans: int, dim: int, patch_size: int, overlap: int, **dd: Any) -> nn.Conv2d:
    """Space to depth, then a linear map: exactly a convolution, whose stride is its kernel unless patches overlap."""
    if not isinstance(overlap, int) or overlap < 0:
        raise ValueError(f"patch_overlap: got {overlap}, expected 0 or a positive whole number")
    kernel = patch_size + 2 * overlap
    return nn.Conv2d(in_chans, dim, kernel, stride=patch_size, padding=overlap, **dd)


def new_head(dim: int, num_classes: int | None, **dd: Any) -> nn.Linear | nn.Identity:
    """The linear map from features to logits; none for 0 classes."""
    return nn.Linear(dim, num_classes, **dd) if num_classes else nn.Identity()


def checked_channels(in_chans: int) -> int:
    if not isinstance(in_chans, int) or in_chans < 1:
        raise ValueError(f"in_chans: got {in_chans}, expected a positive whole number")
    return in_chans


def checked_pool(global_pool: str) -> str:
    if global_pool not in ("avg", ""):
        raise ValueError(f"global_pool: got {global_pool!r}, expected 'avg' or '' (no pooling)")
    return global_pool
