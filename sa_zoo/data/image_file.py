"""Opens all image files of data sets and the explorer. The files are untrusted."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

with suppress(ImportError):
    from pillow_heif import register_heif_opener

    register_heif_opener()

# Pillow's formats without PostScript, which runs code, and without formats of unreported bit depth.
WANTED = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP", "AVIF", "HEIF")
EXTENSIONS = {name for name, kind in Image.registered_extensions().items() if kind in WANTED}
FORMATS = tuple(kind for kind in WANTED if kind in Image.OPEN)  # AVIF and HEIF are optional
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
BITS_PER_SAMPLE = 258  # tag of TIFF


def open_image(file: Path | BinaryIO | Image.Image) -> Image.Image:
    """The first frame of an image file, or an image, rotated according to EXIF. Raises ValueError for unusable ones."""
    with _opened(file) as image:
        upright = ImageOps.exif_transpose(image)
        # Pillow warns when such a palette is converted to modes other than RGBA
        has_transparent_colors = isinstance(upright.info.get("transparency"), bytes)
        return upright.convert("RGBA") if has_transparent_colors else upright


def size_of_image(file: Path | BinaryIO) -> tuple[int, int]:
    """Width and height from the header of an image file. Raises ValueError for unusable files."""
    with _opened(file) as image:
        return image.size


@contextmanager
def _opened(file: Path | BinaryIO | Image.Image) -> Iterator[Image.Image]:
    try:
        source: Any = nullcontext(file)
        if not isinstance(file, Image.Image):
            source = Image.open(file, formats=FORMATS)
        with source as image:
            if image.mode not in MODES or _is_deep(image):
                deep = f"{image.mode} of more than 8 bits per channel"
                got = deep if image.mode in MODES else f"mode {image.mode}"
                expected = f"one of {', '.join(MODES)}, with 8 bits per channel"
                raise ValueError(f"got {got}, expected {expected}: convert it")
            yield image
    except UnidentifiedImageError as error:
        expected = f"an image in one of the formats {', '.join(FORMATS)}"
        raise ValueError(f"cannot identify the file, expected {expected}") from error
    except Image.DecompressionBombError as error:
        way_out = "shrink it, or raise PIL.Image.MAX_IMAGE_PIXELS before a call of sa_zoo in Python"
        raise ValueError(f"{error}: {way_out}") from error
    except Exception as error:  # Pillow raises many types for files that are not images
        raise ValueError(str(error) or type(error).__name__) from error


def _is_deep(image: Any) -> bool:
    """Whether decoding in Pillow would drop bits: PNG, TIFF or PPM with more than 8 bits per channel."""
    tile = getattr(image, "tile", ())  # empty after decoding
    if image.format == "PPM" and tile:
        arguments = tile[0][3]  # of the decoder: (mode, largest value), unless that is 255
        return isinstance(arguments, tuple) and arguments[1] > 255
    return ";16B" in str(tile) or max(getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (8,))) > 8
