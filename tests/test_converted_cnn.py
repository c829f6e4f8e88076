"""A trained CNN in, a complete folder of its attention network out."""

import json
from dataclasses import replace

import pytest
import torch
from model_folders import make_run
from tiny_runs import noise_images, parquet_folder
from transformers import TimmWrapperConfig
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.commands.convert import convert_model
from sa_zoo.folders.write import write_json

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("resnet_tiny_cifar", "mhsa_resnet_tiny_cifar"), ("test_resnet", "mhsa_network")],
)
@pytest.mark.parametrize("arguments", [{}, {"alpha": 4.0, "layers": "layer4.*"}])
def test_the_folder_loads_as_the_converted_network(tmp_path, name, backbone, arguments):
    source = make_run(tmp_path / "cnn", name, num_classes=5)
    described = json.loads((source / "config.json").read_text())
    described["label_names"] = list("abcde")
    described["pretrained_cfg"]["license"] = "cc-by-nc-4.0"
    write_json(source / "config.json", described)
    (source / "metrics.json").write_text('{"base_model": "somebody/cnn"}')
    folder = tmp_path / "converted"
    converted, report = convert_model(str(source), folder, **arguments)
    cnn = sa_zoo.open(source).network
    x = torch.randn(2, *cnn.pretrained_cfg["input_size"])
    difference = (converted.network(x) - cnn(x)).abs().max() / cnn(x).abs().max()
    assert (difference > 0) == bool(arguments)
    assert difference <= 0.3
    assert converted.config["architecture"] == converted.metrics.model == backbone
    labels = TimmWrapperConfig.from_pretrained(folder).id2label
    assert list(labels.values()) == list("abcde")
    assert (folder / "report.md").read_text() == report.table()
    assert converted.metrics.conversion.logits == report.logits
    assert converted.metrics.base_model == "somebody/cnn"
    assert "license: cc-by-nc-4.0\n" in (folder / "README.md").read_text()
    assert {"README.md", "explorer.html"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("resnet_tiny_cifar", {"alpha": float("inf")}, "alpha: got inf"),
        ("sa_quadratic_tiny_cifar", {}, "which is a network of attention, expected a CNN"),
    ],
)
def test_a_conversion_is_refused_before_it_is_written(tmp_path, name, arguments, said):
    make_run(tmp_path / "source", name)
    with pytest.raises(ValueError, match=said):
        convert_model(str(tmp_path / "source"), tmp_path / "converted", **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_both_networks_are_measured_on_the_data_of_the_run(tmp_path):
    images = {"train": noise_images(5, (32, 32)), "test": noise_images(7, (32, 32))}
    data = parquet_folder(tmp_path / "data", images, classes=7)
    source = make_run(tmp_path / "run", "resnet_tiny_cifar", num_classes=7)
    with (source / "train.toml").open("a") as recipe:
        recipe.write(f'[data]\nname = "{data}"\ntitle = "noise"\nrevision = "v5"\n')
        recipe.write("[train]\nepochs = 1\n")
    out = tmp_path / "out"
    command = ["convert", source, "--out", out, "--alpha", "7", "--data", data]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("test accuracy 0.")
    converted = sa_zoo.open(out)
    metrics = converted.metrics
    assert (metrics.data, metrics.test.n) == ("noise", 7)
    cnn = sa_zoo.open(source)
    assert metrics.baseline.test == sa_zoo.evaluate(cnn).test
    attention = replace(cnn, network=converted.network)
    assert metrics.test == sa_zoo.evaluate(attention).test != metrics.baseline.test
    assert "| resnet_tiny_cifar | test | 7 |" in (out / "README.md").read_text()


def test_a_conversion_that_cannot_be_measured_is_kept(tmp_path):
    source = make_run(tmp_path / "run", "resnet_tiny_cifar", num_classes=7)
    (source / "train.toml").unlink()
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=f"got 10 classes, expected 7.*the conversion is in {out}"):
        convert_model(str(source), out, data="digits")
    sa_zoo.publish(out, "you/x", dry_run=True)
