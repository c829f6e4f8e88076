"""The paper's network (Section 4): 2x2 space-to-depth and a linear map, blocks of attention, mean over pixels.

Plain networks have another stem, and stages that pool. Pure torch: the timm and transformers interfaces are built on
it. Everything between the embedding and the head has the layout (B, H, W, D).
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.types import Device

from .attention import Attention
from .blocks import BlockClasses, PlainBlock, PostNormBlock, new_blocks
from .stages import Grid, ImageSize, Layout, Sizes, layout_of
from .terms import Groups, Term, has_fixed_size

_logger = logging.getLogger(__name__)


class PlainStem(nn.Conv2d):
    """GELU(convolution) without padding: images (B, C, H, W) -> (B, 6 (P + 1)^2, (H - 1) // P, (W - 1) // P)

    The kernel reads one row and column more than a patch of P x P pixels. There are as many filters as eigenvectors of
    such squares in three colors, and their negatives (Jordan 2024).
    """

    def __init__(self, in_chans: int, patch_size: int, **dd: Any) -> None:
        kernel = patch_size + 1
        filters = 6 * kernel**2
        super().__init__(in_chans, filters, kernel, patch_size, **dd)

    def forward(self, x: Tensor) -> Tensor:
        # `super` is unknown to TorchScript
        return gelu(self._conv_forward(x, self.weight, self.bias))


def new_embedding(in_chans: int, layout: Layout, **dd: Any) -> nn.Conv2d:
    """Space-to-depth and a linear map as one convolution, whose stride is its kernel size; plain: a PlainStem."""
    if not isinstance(in_chans, int) or in_chans < 1:
        raise ValueError(f"in_chans: got {in_chans}, expected a whole number from 1")
    side = layout.patch_size
    if layout.plain:
        return PlainStem(in_chans, side, **dd)
    return nn.Conv2d(in_chans, layout.stages[0].dim, side, side, **dd)


def new_head(layout: Layout, num_classes: int | None, **dd: Any) -> nn.Linear | nn.Identity:
    """The linear map from features to logits; none for 0 classes."""
    if not num_classes:
        return nn.Identity()
    return nn.Linear(layout.stages[-1].dim, num_classes, **dd)


def check_terms(terms: object) -> None:
    """Raise ValueError for anything but tuples of classes of score terms."""
    groups = terms if isinstance(terms, tuple) else ()
    tuples = all(isinstance(group, tuple) and group for group in groups)
    classes = [term for group in groups for term in group] if tuples else []
    if not classes or not all(isinstance(t, type) and issubclass(t, Term) for t in classes):
        expected = "tuples of classes of score terms, such as ((Quadratic,),)"
        raise ValueError(f"terms: got {terms}, expected {expected}")


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


class SANet(nn.Module):
    """Self-attention network for images; the defaults are the paper's CIFAR models.

    Args:
        terms: groups of classes of score terms (terms.py); the blocks are divided equally among the groups.
        patch_size: side of a token's square of pixels, P.
        embed_dim, depth, num_heads, hidden_dim: D, number of blocks, N_h, width of the feed-forward layers.
        plain: whether the network is plain: no residual connections, no feed-forward layers (`hidden_dim` is 0), one
            stage per number of `depth`, with max-pooling, and PlainStem. The other sizes are one number per stage or
            for all.
        global_pool: "avg" or "" (none: the head is applied to every pixel).
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: dropout before the head, after every linear
            pair, on the attention probabilities, and of whole residual branches (the last block's rate).

    Raises:
        ValueError: for sizes other than positive whole numbers, `terms` other than classes, an unknown
            `global_pool`, or an `img_size` that the tokens of the last stage do not tile.
    """

    block_classes: BlockClasses = (PostNormBlock, PlainBlock)

    def __init__(
        self,
        terms: Groups,
        img_size: ImageSize = 32,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "avg",
        patch_size: int = 2,
        embed_dim: Sizes = 400,
        depth: Sizes = 6,
        num_heads: Sizes = 9,
        hidden_dim: Sizes = 512,
        plain: bool = False,
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
        sizes = (embed_dim, depth, num_heads, hidden_dim)
        self.layout = layout_of(patch_size, *sizes, plain)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.patch_size = patch_size
        self.reduction = self.layout.reductions[-1]
        self.num_features = self.head_hidden_size = self.embed_dim = self.layout.stages[-1].dim
        self.img_size = self.layout.checked_size(img_size)
        self.global_pool = checked_pool(global_pool)
        self.patch_embed = new_embedding(in_chans, self.layout, **dd)
        drops = {"proj_drop": proj_drop_rate, "attn_drop": attn_drop_rate}
        dim_in = self.patch_embed.out_channels
        layout, size = self.layout, self.img_size
        blocks = new_blocks(
            self.block_classes, layout, terms, size, dim_in, drop_path_rate, **drops, **dd
        )
        self.blocks: Any = nn.Sequential(*blocks)
        self.fixed_img_size = has_fixed_size(terms)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = new_head(layout, num_classes, **dd)

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
            maps.append(block.attn.probabilities(x))
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
        """Initialize all parameters again: score terms by their own rules, all others as in PyTorch."""
        modules = list(self.modules())
        for module in reversed(modules):  # a module's values for its children come last
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
