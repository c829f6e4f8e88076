"""`sa-zoo heads`, from a folder to the tables and the figures."""

import pytest
import timm
import torch
from small_networks import convolutional_network
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.commands.convert import convert_model
from sa_zoo.folders.write import write_timm_files


def heads(*arguments):
    result = CliRunner().invoke(app, ["heads", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def rows_of(output):
    """The rows of all tables that were printed, without their heads."""
    lines = [line.strip("|") for line in output.splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in rows if row[0] and set(row[0]) != {"-"} and row[0] != "layer"]


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
    output = heads(folder, "--data", "digits", "--convolve", "3,1", "--out", tmp_path)
    accuracy = sa_zoo.evaluate(folder, "digits").test.percent
    rows = rows_of(output)
    assert [row[0] for row in rows] == ["blocks.0.attn", "blocks.1.attn", "all"]
    assert [row[1] for row in rows] == [accuracy] * 3
    assert all(float(row[2]) < 1e-5 < float(row[4]) for row in rows[:2])
    assert rows[2][3] != accuracy  # of single pixels
    assert f"with attention: {accuracy} (digits, 1797 images)" in output
    assert (tmp_path / "convolutions.md").read_text().strip() == output.strip()


def test_the_table_of_a_folder_needs_no_data(folder, tmp_path):
    output = heads(folder, "--window", "3", "--out", tmp_path)
    rows = [row for row in rows_of(output) if row[1] != "mean"]
    assert [row[3] for row in rows] == ["tap"] * 18
    assert (tmp_path / "heads.md").read_text().strip() == output.strip()
    assert (tmp_path / "head_depth.png").is_file()


def test_layers_that_pad_or_have_a_stride_are_named(tmp_path):
    convert_model("resnet_tiny_cifar", tmp_path / "converted")
    output = heads(tmp_path / "converted")
    assert {row[0] for row in rows_of(output)} == {"layer1.0.downsample.0"}
    left_out = output.splitlines()[-1]
    assert left_out.startswith("Not shown, because their keys include padding")
    assert "conv1, " in left_out and "layer1.0.downsample.0" not in left_out


def test_heads_of_a_transformer_are_described_on_images(transformer):
    rows = rows_of(heads(transformer, "--data", "digits", "--window", "1"))
    assert [row[1] for row in rows] == ["1", "2", "mean"] * 2
    assert all(row[8].endswith("%") for row in rows)


def test_heads_of_a_transformer_become_convolutions(transformer, tmp_path):
    arguments = [transformer, "--data", "digits", "--convolve"]
    output = heads(*arguments, "1", "--out", tmp_path)
    rows = [row for row in rows_of(output) if row[0].endswith(" of 4")]
    assert [row[0] for row in rows] == [f"{count} of 4" for count in range(5)]
    accuracy = sa_zoo.evaluate(transformer, "digits").test.percent
    assert rows[0][1:3] == ["0.00", accuracy] and rows[0][5] == "0, 0"
    farthest = [float(row[1]) for row in rows]
    assert farthest == sorted(farthest)
    assert all(float(row[3]) > 0 for row in rows)
    assert all(float(bound) > 0 for bound in rows[4][5].split(", "))
    assert (tmp_path / "convolved_heads.md").read_text().strip() == output.strip()
    assert (tmp_path / "convolved_heads.png").is_file()
    for option, value, expected in (("--below", "2.5", "4 of 4"), ("--most", "3", "3 of 4")):
        rows = rows_of(heads(*arguments, "3", option, value))
        assert [row[0] for row in rows if row[0].endswith(" of 4")] == ["0 of 4", expected]


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("folder", "--convolve 3", "--data: got nothing"),
        ("folder", "--convolve x --data digits", "--convolve: got x"),
        ("transformer", "--most 3", "--most, --below: got VisionTransformer"),
        ("transformer", "--convolve 3 --most 3 --below 1", "--below: got 1.0 with --most 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(model, arguments, said, request, tmp_path):
    source = request.getfixturevalue(model)
    command = ["heads", str(source), *arguments.split(), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and said in result.stderr
    assert not any(tmp_path.iterdir())
