"""The squares of pixels of a network's tokens, and the features that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ImageSize = int | Sequence[int]  # in pixels: the side of a square, or height and width
Grid = tuple[int, int]  # (H, W), in tokens


class Level(NamedTuple):
    """Features after `blocks` blocks: `dim` channels, one token per square of `reduction` x `reduction` pixels."""

    blocks: int
    dim: int
    reduction: int


@dataclass(frozen=True)
class Layout:
    """The tokens of a network.

    sides: side of a token's square of pixels, before the first block and after each.
    levels: the features that timm and transformers return.
    margin: rows and columns of pixels that the first layer reads beyond its squares.
    """

    sides: list[int]
    levels: list[Level]
    margin: int = 0

    @property
    def reduction(self) -> int:
        """Side of the last tokens' squares of pixels. They have to tile an image."""
        return self.sides[-1]

    def token_grids(self, image_size: Sequence[int]) -> list[Grid]:
        """The grids of tokens before the first block and after each, for images of (height, width) pixels."""
        height, width = (size - self.margin for size in image_size)
        return [(height // side, width // side) for side in self.sides]

    def grids(self, image_size: Sequence[int]) -> list[Grid]:
        """The grid of each block's attention, for images of (height, width) pixels."""
        return self.token_grids(image_size)[:-1]

    def checked_size(self, image_size: ImageSize) -> tuple[int, int]:
        """(height, width) of an image. Raises ValueError unless the last tokens' squares tile it."""
        height, width = height_and_width(image_size)
        tiles = self.reduction
        least = tiles * (1 + self.margin)
        if height % tiles or width % tiles or min(height, width) < least:
            expected = f"positive multiples of {tiles} from {least} on"
            raise ValueError(f"img_size: got {height}x{width}, expected {expected}")
        return height, width


def height_and_width(image_size: ImageSize) -> tuple[int, int]:
    """An image's size as (height, width), in pixels."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    return height, width


def check_positive(**sizes: Any) -> None:
    """Raise ValueError for sizes that are not positive whole numbers."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: got {size!r}, expected a whole number from 1")
