import io

import numpy as np
import pytest
from PIL import Image
from tiny_runs import noise_images

from sa_zoo.data.image_file import FORMATS, open_image

LOSSLESS = {"BMP": {}, "PNG": {}, "PPM": {}, "TIFF": {}, "WEBP": {"lossless": True}}


@pytest.mark.parametrize("kind", FORMATS)
def test_pictures_of_usual_formats_are_read(kind):
    picture = noise_images(1, (13, 7))[0]
    picture.save(content := io.BytesIO(), kind, **LOSSLESS.get(kind, {}))
    found = open_image(content)
    assert found.size == (13, 7)
    if kind in LOSSLESS:
        assert np.array_equal(np.array(found), np.array(picture))


def test_pictures_are_turned_upright(tmp_path):
    picture, exif = noise_images(1, (13, 7))[0], Image.Exif()
    exif[0x0112] = 6  # orientation: shown after a quarter turn clockwise
    picture.save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.array(open_image(tmp_path / "x.png")), np.rot90(np.array(picture), -1))


def test_palettes_with_transparent_colors_give_no_warning(tmp_path):
    picture = noise_images(1)[0].quantize(7)
    picture.save(tmp_path / "x.png", transparency=bytes([0, 128, 255]))
    assert np.array_equal(open_image(tmp_path / "x.png").convert("RGB"), picture.convert("RGB"))
