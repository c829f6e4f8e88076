import io

import numpy as np
import pytest
from PIL import Image
from tiny_runs import noise_images

from sa_zoo.data.image_file import FORMATS, open_image

LOSSLESS = {"BMP": {}, "PNG": {}, "PPM": {}, "TIFF": {}, "WEBP": {"lossless": True}}


def stored(image: Image.Image, kind: str, **options: object) -> io.BytesIO:
    content = io.BytesIO()
    image.save(content, kind, **options)
    content.seek(0)
    return content


@pytest.mark.parametrize("kind", FORMATS)
def test_pictures_of_usual_formats_are_read(kind):
    picture = noise_images(1, (13, 7))[0]
    found = open_image(stored(picture, kind, **LOSSLESS.get(kind, {})))
    assert found.size == (13, 7)
    if kind in LOSSLESS:
        assert np.array_equal(np.array(found), np.array(picture))


def test_pictures_are_turned_upright(tmp_path):
    picture, exif = noise_images(1, (13, 7))[0], Image.Exif()
    exif[0x0112] = 6  # orientation: shown after a quarter turn clockwise
    picture.save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.array(open_image(tmp_path / "x.png")), np.rot90(np.array(picture), -1))


@pytest.mark.parametrize("kind", ["TGA", "JPEG2000"])
def test_other_formats_are_refused(kind):
    with pytest.raises(ValueError, match="cannot identify"):
        open_image(stored(noise_images(1)[0], kind))


def test_a_picture_that_is_too_large_says_what_to_set(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 13)
    with pytest.raises(ValueError, match=r"raise PIL\.Image\.MAX_IMAGE_PIXELS"):
        open_image(stored(noise_images(1)[0], "PNG"))


def test_palettes_with_transparent_colors_give_no_warning(tmp_path):
    picture = noise_images(1)[0].quantize(7)
    picture.save(tmp_path / "x.png", transparency=bytes([0, 128, 255]))
    assert np.array_equal(open_image(tmp_path / "x.png").convert("RGB"), picture.convert("RGB"))
