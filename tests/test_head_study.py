"""`sa-zoo heads`, from a folder to the tables and the figures."""

import re

import pytest
import timm
import torch
from planted import convolutional_network
from typer.testing import CliRunner

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.cli import app
from sa_zoo.folders.opened import open_model
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.config import DataConfig
from sa_zoo.training.evaluate import evaluate_opened
from sa_zoo.verbs.convert import convert


def heads(*arguments):
    result = CliRunner().invoke(app, ["heads", *map(str, arguments)])
    return result.exit_code, result.output


def cells(output):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in output.splitlines()
        if line[:1] == "|"
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network of 3x3 convolutions, but for one head of the second layer, which attends everywhere."""
    network = convolutional_network(num_classes=10)
    with torch.no_grad():
        network.blocks[1].attn.terms[0].spread[4] = 1e-3
    out = tmp_path_factory.mktemp("runs") / "planted"
    out.mkdir()
    write_timm_files(out, network, data_config={"input_size": (3, 16, 16)})
    return out


def test_a_network_of_convolutions_keeps_its_accuracy_as_convolutions(tmp_path):
    network = convolutional_network(num_classes=10)
    write_timm_files(tmp_path, network, data_config={"input_size": (3, 16, 16)})
    code, output = heads(
        tmp_path, "--data", "digits", "--convolve", "3,5", "--out", tmp_path / "study"
    )
    assert code == 0, output
    accuracy = evaluate_opened(open_model(str(tmp_path)), DataConfig(name="digits")).test.top1
    first, second, every = cells(output)[2:]
    assert [first[0], second[0], every[0]] == ["blocks.0.attn", "blocks.1.attn", "all"]
    assert [*first[1::2], *second[1::2], *every[1::2]] == [f"{accuracy:.2%}"] * 6
    assert all(float(bound) < 1e-5 for bound in [*first[2::2], *second[2::2]])
    assert f"with attention: {accuracy:.2%} (digits, 1797 images)" in output
    assert (tmp_path / "study" / "convolutions.md").read_text().strip() == output.strip()


def test_the_table_of_a_folder_needs_no_data(folder, tmp_path):
    code, output = heads(folder, "--window", "3", "--out", tmp_path / "study")
    assert code == 0, output
    rows = [row for row in cells(output)[2:] if row[1] != "mean"]
    assert [row[3] for row in rows] == ["5e-07" if index == 13 else "tap" for index in range(18)]
    assert (tmp_path / "study" / "heads.md").read_text().strip() == output.strip()
    assert (tmp_path / "study" / "head_depth.png").is_file()


def test_layers_without_a_row_are_named(tmp_path):
    cnn, source = timm.create_model("resnet_tiny_cifar", num_classes=3), tmp_path / "cnn"
    source.mkdir()
    write_timm_files(source, cnn)
    convert(str(source), tmp_path / "converted")
    code, output = heads(tmp_path / "converted", "--out", tmp_path / "study")
    assert code == 0, output
    convolutions = {
        name: each for name, each in cnn.named_modules() if isinstance(each, torch.nn.Conv2d)
    }
    plain = [
        name
        for name, conv in convolutions.items()
        if conv.padding == (0, 0) and conv.stride == (1, 1)
    ]
    assert {row[0] for row in cells(output)[2:]} == set(plain) == {"layer1.0.downsample.0"}
    left_out = ", ".join(name for name in convolutions if name not in plain)
    assert (
        f"Not shown, because their keys include padding or they have a stride: {left_out}."
        in output
    )
    assert (tmp_path / "study" / "heads.md").read_text().strip() == output.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--convolve", "3"], "--data: got nothing, expected a data set"),
        (["--convolve", "4", "--data", "digits"], "window: got 4, expected an odd number up to 8"),
        (
            ["--convolve", "x", "--data", "digits"],
            "--convolve: got x, expected whole numbers, such as 3,5,7",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(folder, tmp_path, arguments, said):
    code, output = heads(folder, *arguments, "--out", tmp_path / "out")
    assert code == 1 and said in output
    assert not any(tmp_path.iterdir())


def test_a_vision_transformer_of_timm_is_described_on_images(tmp_path):
    torch.manual_seed(0)
    write_timm_files(tmp_path, timm.create_model("test_vit", num_classes=10, img_size=32, depth=1))
    code, output = heads(tmp_path, "--data", "digits", "--window", "1")
    assert code == 0, output
    rows = cells(output)[2:]
    assert [row[1] for row in rows] == ["1", "2", "mean"] and all(
        re.fullmatch(r"\d+%", row[8]) for row in rows
    )


def test_heads_of_a_vision_transformer_become_convolutions(tmp_path):
    torch.manual_seed(0)
    sizes = {"img_size": 64, "depth": 2, "dynamic_img_size": False}
    network = timm.create_model("test_vit", num_classes=10, **sizes)
    write_timm_files(tmp_path, network)
    accuracy = evaluate_opened(open_model(str(tmp_path)), DataConfig(name="digits")).test.top1
    arguments = [tmp_path, "--data", "digits", "--convolve", "1,3", "--out", tmp_path / "study"]
    code, output = heads(*arguments)
    assert code == 0, output
    rows = [row for row in cells(output) if row[0].endswith(" of 4")]
    assert [row[0] for row in rows] == 2 * [f"{count} of 4" for count in range(5)]
    assert rows[0][1:3] == rows[5][1:3] == ["0.00", f"{accuracy:.2%}"] and rows[0][5] == "0, 0"
    farthest = [float(row[1]) for row in rows[:5]]
    assert farthest == sorted(farthest) and all(float(row[3]) > 0 for row in rows)
    assert all(float(bound) > 0 for bound in rows[4][5].split(", "))
    assert (tmp_path / "study" / "convolved_heads.md").read_text().strip() == output.strip()
    assert (tmp_path / "study" / "convolved_heads.png").is_file()
    for below, rows in (("0", ["0 of 4"]), ("2.5", ["0 of 4", "4 of 4"])):  # distances are below 2
        code, output = heads(*arguments[:3], "--convolve", "3", "--below", below)
        assert [row[0] for row in cells(output)[2:]] == rows, output
    code, output = heads(*arguments[:3], "--convolve", "3", "--most", "3")
    assert [row[0] for row in cells(output)[2:]] == ["0 of 4", "3 of 4"], output
    code, output = heads(*arguments[:3], "--convolve", "3", "--most", "3", "--below", "1")
    assert code == 1 and "--below: got 1.0 with --most 3, expected one of the two" in output
    code, output = heads(*arguments[:3], "--convolve", "3", "--most", "3,5")
    assert code == 1 and "most: got 5, expected a number from 0 to 4" in output
    code, output = heads(*arguments[:3], "--most", "3")
    assert code == 1 and "--most, --below: got VisionTransformer, expected --convolve" in output
