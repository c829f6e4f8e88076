"""`sa-zoo heads`, from a folder to the tables and the figures."""

import pytest
import timm
import torch
from small_networks import convolutional_network
from typer.testing import CliRunner

from sa_zoo.cli import app
from sa_zoo.folders.opened import open_model
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.config import DataConfig
from sa_zoo.training.evaluate import evaluate_opened
from sa_zoo.verbs.convert import convert_model


def heads(*arguments):
    result = CliRunner().invoke(app, ["heads", *map(str, arguments)])
    return result.exit_code, result.stdout or result.stderr


def rows_of(code, output):
    """The rows of all tables that were printed, without their heads."""
    assert code == 0, output
    lines = [line.strip("|") for line in output.splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in rows if row[0] and set(row[0]) != {"-"} and row[0] != "layer"]


def accuracy_of(folder):
    return f"{evaluate_opened(open_model(str(folder)), DataConfig(name='digits')).test.top1:.2%}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network of 3x3 convolutions."""
    out = tmp_path_factory.mktemp("planted")
    write_timm_files(out, convolutional_network(), data_config={"input_size": (3, 16, 16)})
    return out


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("vit")
    sizes = {"img_size": 64, "depth": 2, "dynamic_img_size": False}
    write_timm_files(out, timm.create_model("test_vit", num_classes=10, **sizes))
    return out


def test_convolutions_keep_their_accuracy_as_convolutions(folder, tmp_path):
    code, output = heads(folder, "--data", "digits", "--convolve", "3,1", "--out", tmp_path)
    accuracy = accuracy_of(folder)
    rows = rows_of(code, output)
    assert [row[0] for row in rows] == ["blocks.0.attn", "blocks.1.attn", "all"]
    assert [row[1] for row in rows] == [accuracy] * 3
    assert all(float(row[2]) < 1e-5 < float(row[4]) for row in rows[:2])
    assert rows[2][3] != accuracy  # of single pixels
    assert f"with attention: {accuracy} (digits, 1797 images)" in output
    assert (tmp_path / "convolutions.md").read_text().strip() == output.strip()


def test_the_table_of_a_folder_needs_no_data(folder, tmp_path):
    code, output = heads(folder, "--window", "3", "--out", tmp_path)
    rows = [row for row in rows_of(code, output) if row[1] != "mean"]
    assert [row[3] for row in rows] == ["tap"] * 18
    assert (tmp_path / "heads.md").read_text().strip() == output.strip()
    assert (tmp_path / "head_depth.png").is_file()


def test_layers_that_pad_or_have_a_stride_are_named(tmp_path):
    source = tmp_path / "cnn"
    source.mkdir()
    write_timm_files(source, timm.create_model("resnet_tiny_cifar", num_classes=3))
    convert_model(str(source), tmp_path / "converted")
    code, output = heads(tmp_path / "converted")
    assert {row[0] for row in rows_of(code, output)} == {"layer1.0.downsample.0"}
    left_out = output.splitlines()[-1]
    assert left_out.startswith("Not shown, because their keys include padding")
    assert "conv1, " in left_out and "layer1.0.downsample.0" not in left_out


def test_heads_of_a_transformer_are_described_on_images(transformer):
    rows = rows_of(*heads(transformer, "--data", "digits", "--window", "1"))
    assert [row[1] for row in rows] == ["1", "2", "mean"] * 2
    assert all(row[8].endswith("%") for row in rows)


def test_heads_of_a_transformer_become_convolutions(transformer, tmp_path):
    arguments = [transformer, "--data", "digits", "--convolve"]
    code, output = heads(*arguments, "1,3", "--out", tmp_path)
    rows = [row for row in rows_of(code, output) if row[0].endswith(" of 4")]
    assert [row[0] for row in rows] == 2 * [f"{count} of 4" for count in range(5)]
    assert rows[0][1:3] == rows[5][1:3] == ["0.00", accuracy_of(transformer)]
    assert rows[0][5] == "0, 0"
    farthest = [float(row[1]) for row in rows[:5]]
    assert farthest == sorted(farthest)
    assert all(float(row[3]) > 0 for row in rows)
    assert all(float(bound) > 0 for bound in rows[4][5].split(", "))
    assert (tmp_path / "convolved_heads.md").read_text().strip() == output.strip()
    assert (tmp_path / "convolved_heads.png").is_file()
    for options, expected in (
        (["--below", "0"], ["0 of 4"]),
        (["--below", "2.5"], ["0 of 4", "4 of 4"]),  # distances are below 2
        (["--most", "3"], ["0 of 4", "3 of 4"]),
    ):
        rows = rows_of(*heads(*arguments, "3", *options))
        assert [row[0] for row in rows if row[0].endswith(" of 4")] == expected


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("folder", "--convolve 3", "--data: got nothing, expected a data set"),
        ("folder", "--convolve 4 --data digits", "window: got 4, expected an odd number up to 8"),
        ("folder", "--convolve x --data digits", "--convolve: got x, expected whole numbers"),
        ("transformer", "--most 3", "--most, --below: got VisionTransformer, expected --convolve"),
        (
            "transformer",
            "--data digits --convolve 3 --most 3 --below 1",
            "--below: got 1.0 with --most 3, expected one of the two",
        ),
        (
            "transformer",
            "--data digits --convolve 3 --most 3,5",
            "most: got 5, expected a number from 0 to 4",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(model, arguments, said, request, tmp_path):
    source = request.getfixturevalue(model)
    code, output = heads(source, *arguments.split(), "--out", tmp_path / "out")
    assert code == 1
    assert said in output
    assert not any(tmp_path.iterdir())
