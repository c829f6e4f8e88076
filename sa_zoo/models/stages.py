"""The sizes of a network: one stage, or in plain ones a sequence, each of half the height and width of the last."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

Sizes = int | Sequence[int]  # one number for all stages, or one per stage
ImageSize = int | Sequence[int]  # in pixels: the side of a square, or height and width
Grid = tuple[int, int]  # (H, W), in tokens
MOST_STAGES = 8


class Stage(NamedTuple):
    """Blocks of one size: D, their number, N_h, width of the feed-forward layers, 0 in plain networks."""

    dim: int
    depth: int
    num_heads: int
    hidden_dim: int


class Level(NamedTuple):
    """Features after `blocks` blocks: `dim` channels, one token per square of `reduction` x `reduction` pixels."""

    blocks: int
    dim: int
    reduction: int


@dataclass(frozen=True)
class Layout:
    """The stages of a network and derived sizes. The first tokens are squares of `patch_size` pixels.

    plain: whether the network is plain: its stem loses a pixel per axis (network.py, `PlainStem`), and every stage
        pools after its first attention. Other networks have one stage.
    """

    patch_size: int
    stages: Sequence[Stage]
    plain: bool = False

    @property
    def sizes(self) -> list[Any]:
        """`embed_dim`, `depth`, `num_heads` and `hidden_dim`: numbers if there is one stage, else one list each."""
        columns = [list(column) for column in zip(*self.stages, strict=True)]
        if len(self.stages) == 1:
            return [column[0] for column in columns]
        return columns

    @property
    def reductions(self) -> list[int]:
        """Side of a token's square of pixels in each stage."""
        return [self.patch_size * 2 ** (number + self.plain) for number in range(len(self.stages))]

    @property
    def levels(self) -> list[Level]:
        """The levels of features: the output of each stage of a plain network, and of each block of others."""
        if not self.plain:
            (stage,) = self.stages
            return [Level(block, stage.dim, self.patch_size) for block in range(1, stage.depth + 1)]
        ends = accumulate(stage.depth for stage in self.stages)
        dims = [stage.dim for stage in self.stages]
        return [Level(*row) for row in zip(ends, dims, self.reductions, strict=True)]

    def token_grids(self, image_size: Sequence[int]) -> list[Grid]:
        """The grids of tokens before the first block and after each, for images of (height, width) pixels."""
        height, width = (size - self.plain for size in image_size)
        sides = [self.patch_size]
        for stage, reduction in zip(self.stages, self.reductions, strict=True):
            sides += [reduction] * stage.depth
        return [(height // side, width // side) for side in sides]

    def grids(self, image_size: Sequence[int]) -> list[Grid]:
        """The grid that each block's attention sees, for images of (height, width) pixels."""
        tokens = self.token_grids(image_size)
        return tokens[:-1] if self.plain else tokens[1:]

    def checked_size(self, image_size: ImageSize) -> tuple[int, int]:
        """(height, width) of an image. Raises ValueError unless tokens of the last stage tile it."""
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        tiles = self.reductions[-1]
        least = 2 * tiles if self.plain else tiles
        if height % tiles or width % tiles or min(height, width) < least:
            expected = f"positive multiples of {tiles} from {least} on"
            raise ValueError(f"img_size: got {height}x{width}, expected {expected}")
        return height, width


def layout_of(
    patch_size: int,
    embed_dim: Sizes,
    depth: Sizes,
    num_heads: Sizes,
    hidden_dim: Sizes,
    plain: bool = False,
) -> Layout:
    """One stage per number of `depth`. Raises ValueError for anything but positive whole numbers that fit."""
    given = (embed_dim, depth, num_heads, hidden_dim)
    columns: list[Any] = [
        list(size) if isinstance(size, list | tuple) else [size] for size in given
    ]
    count = len(columns[1])
    filled = [column * count if len(column) == 1 else column for column in columns]
    numbers = [patch_size, *(size for column in filled[:3] for size in column)]
    if not plain:
        numbers += filled[3]
    elif not all(isinstance(width, int) and width == 0 for width in filled[3]):
        raise ValueError(f"hidden_dim: got {hidden_dim}, expected 0 in plain networks")
    whole = all(isinstance(number, int) and number >= 1 for number in numbers)
    most = MOST_STAGES if plain else 1
    if not whole or not 1 <= count <= most or any(len(column) != count for column in filled):
        raise ValueError(
            f"patch_size, embed_dim, depth, num_heads, hidden_dim: got {(patch_size, *given)}, expected positive "
            f"whole numbers; in plain networks one each or one per stage, of which there may be {MOST_STAGES}"
        )
    stages = [Stage(*sizes) for sizes in zip(*filled, strict=True)]
    return Layout(patch_size, stages, plain)
