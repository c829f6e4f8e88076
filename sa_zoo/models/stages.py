"""The sizes of a network: a sequence of stages, each with half the height and width of the one before it."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

Sizes = (
    int | Sequence[int]
)  # of a network with one stage, or of all stages; or one number per stage
ImageSize = int | Sequence[int]  # in pixels: the side of a square, or height and width
Grid = tuple[int, int]  # (H, W), in tokens


class Stage(NamedTuple):
    """Blocks of one size on one grid: D, how many, N_h, width of the feed-forward layers."""

    dim: int
    depth: int
    num_heads: int
    hidden_dim: int


class Level(NamedTuple):
    """Features after so many blocks: `dim` channels, one token per square of `reduction` x `reduction` pixels."""

    blocks: int
    dim: int
    reduction: int


def stages_of(embed_dim: Sizes, depth: Sizes, num_heads: Sizes, hidden_dim: Sizes) -> list[Stage]:
    """One stage, or one per number of `depth`. Raises ValueError for anything but positive whole numbers that fit."""
    given = (embed_dim, depth, num_heads, hidden_dim)
    columns = [list(size) if isinstance(size, list | tuple) else [size] for size in given]
    count = len(columns[1])
    filled = [column * count if len(column) == 1 else column for column in columns]
    whole = all(isinstance(size, int) and size >= 1 for column in filled for size in column)
    if not whole or count == 0 or any(len(column) != count for column in filled):
        raise ValueError(
            f"embed_dim, depth, num_heads, hidden_dim: got {given}, expected positive whole numbers, "
            "one each or one per stage"
        )
    return [Stage(*sizes) for sizes in zip(*filled, strict=True)]


def reductions_of(stages: Sequence[Stage], patch_size: int) -> list[int]:
    """Side of the square of pixels that is one token of each stage."""
    return [patch_size * 2**number for number in range(len(stages))]


def grids_of(stages: Sequence[Stage], patch_size: int, image_size: Sequence[int]) -> list[Grid]:
    """The grid of every block for images of (height, width) pixels."""
    height, width = image_size
    rows = zip(stages, reductions_of(stages, patch_size), strict=True)
    return [
        (height // reduction, width // reduction)
        for stage, reduction in rows
        for _ in range(stage.depth)
    ]


def levels_of(stages: Sequence[Stage], patch_size: int) -> list[Level]:
    """The levels of features: the output of each stage, or of each block if there is one stage."""
    if len(stages) == 1:
        (stage,) = stages
        return [Level(block, stage.dim, patch_size) for block in range(1, stage.depth + 1)]
    ends = accumulate(stage.depth for stage in stages)
    dims = [stage.dim for stage in stages]
    rows = zip(ends, dims, reductions_of(stages, patch_size), strict=True)
    return [Level(*row) for row in rows]


def checked_size(image_size: ImageSize, reduction: int) -> tuple[int, int]:
    """(height, width) of an image that squares of `reduction` pixels tile. Raises ValueError if they do not."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if height % reduction or width % reduction or min(height, width) < reduction:
        raise ValueError(
            f"img_size: got {height}x{width}, expected positive multiples of {reduction}"
        )
    return height, width
