"""Classes of pictures: `sa-zoo predict` and `sa_zoo.open(...).predict`."""

import numpy as np
import pytest
import timm
import torch
from hostile import change_config
from model_folders import make_run
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_model_data_config
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.opened import class_names

SMALL = {"embed_dim": 7, "depth": 2, "hidden_dim": 11, "num_heads": 3, "num_classes": 7}
NAMES = ["owl", "cat", "ant\nelk: dog 1.000", "\x1b[2Jbee", "fox", "hen", "yak"]


@pytest.fixture
def run(tmp_path):
    folder = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar", **SMALL)
    change_config(label_names=NAMES)(folder)
    return folder


@pytest.fixture
def photo(tmp_path):
    """A photograph of 53 x 41 pixels on its side."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (53, 41, 3), np.uint8))
    image.getexif()[0x0112] = 6
    (tmp_path / "photos/more").mkdir(parents=True)
    image.save(tmp_path / "photos/more/b.png", exif=image.getexif())
    return tmp_path / "photos/more/b.png"


@pytest.mark.parametrize("several", [False, True])
def test_pictures_and_files_have_the_probabilities_of_the_evaluation_transform(run, photo, several):
    if several:
        change_config(problem_type="multi_label_classification")(run)
    opened = sa_zoo.open(run)
    image = Image.open(photo)
    transform = create_transform(**resolve_model_data_config(opened.network))
    logits = opened.network(transform(ImageOps.exif_transpose(image))[None])[0]
    expected = logits.sigmoid() if several else logits.softmax(dim=0)
    first, second = opened.predict([image, str(photo)], top=100)
    assert first == second and opened.predict(photo) == [first[:5]]
    order = expected.argsort(descending=True)
    assert [name for name, _ in first] == [NAMES[index] for index in order]
    torch.testing.assert_close(torch.tensor([p for _, p in first]), expected[order])
    assert opened.network.bfloat16() and opened.predict(photo)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"label_names": list("abcdefg"), "label_descriptions": {"b": "bee"}}, ["a", "bee"]),
        ({"label_names": ["a"]}, ["0", "1"]),
        ({"num_classes": 1000}, ["tench, Tinca tinca", "goldfish, Carassius auratus"]),
    ],
)
def test_classes_are_named_as_well_as_the_model_allows(config, names):
    classes = config.get("num_classes", 7)
    network = timm.create_model("sa_quadratic_tiny_cifar", **SMALL | {"num_classes": classes})
    network.pretrained_cfg |= config
    assert class_names(network)[:2] == names and len(class_names(network)) == classes


def test_what_is_no_picture_or_does_not_classify_is_refused(run, photo):
    with pytest.raises(TypeError, match="got ndarray, expected a file or a PIL"):
        sa_zoo.open(run).predict(np.eye(7))
    with pytest.raises(TypeError, match="got Identity, expected"):
        sa_zoo.open(torch.nn.Identity())
    change_config(problem_type="regression")(run)
    with pytest.raises(ValueError, match="expected a classifier"):
        sa_zoo.open(run).predict(photo)


def test_the_command_names_broken_files_and_classifies_the_others(run, photo):
    """In a line per image, also with names of classes that would clear a terminal or add a line."""
    folder = photo.parents[1]
    (folder / "a.JPG").write_bytes(b"no image")
    (folder / ".hidden.png").write_bytes(b"no image")
    (folder / "notes.txt").touch()
    result = CliRunner().invoke(
        app, ["predict", str(run), str(folder), "nowhere.png", "--top", "7"]
    )
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{photo}: ") and line.count("; ") == 6
    assert "ant elk: dog 1.000 0." in line and "[2Jbee 0." in line and "\x1b" not in line
    assert result.exit_code == 1
    assert "got 2 files" in result.stderr and "more/b" not in result.stderr
    assert f"{folder / 'a.JPG'}: " in result.stderr and "nowhere.png: " in result.stderr
    assert "notes" not in result.stderr and "hidden" not in result.stderr
    result = CliRunner().invoke(app, ["predict", str(run), str(run.parent / "run")])
    assert result.exit_code == 1 and "without images" in result.stderr
