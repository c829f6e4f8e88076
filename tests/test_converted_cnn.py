"""converted_cnn.py: a trained CNN in, a folder of its attention network out."""

import json

import pytest
import torch
from model_folders import load_model, make_run
from transformers import TimmWrapperConfig

from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import write_json
from sa_zoo.interchange.converted_cnn import write_converted


@pytest.fixture
def write(tmp_path):
    def converted(source, **arguments):
        folder = tmp_path / "converted"
        folder.mkdir()
        return folder, write_converted(open_folder(source), folder, **arguments)

    return converted


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("resnet_tiny_cifar", "mhsa_resnet_tiny_cifar"), ("test_resnet", "mhsa_network")],
)
@pytest.mark.parametrize("arguments", [{}, {"alpha": 4.0, "layers": "layer4.*", "content": True}])
def test_the_folder_loads_as_the_converted_network(write, tmp_path, name, backbone, arguments):
    source = make_run(tmp_path / "cnn", name, num_classes=5)
    described = json.loads((source / "config.json").read_text())
    described["label_names"] = list("abcde")
    described["pretrained_cfg"]["hf_hub_id"] = "somebody/cnn@v1"
    write_json(source / "config.json", described)
    folder, report = write(source, **arguments)
    cnn, converted = load_model(str(source)), load_model(str(folder))
    x = torch.randn(2, *cnn.pretrained_cfg["input_size"])
    difference = (converted(x) - cnn(x)).abs().max() / cnn(x).abs().max()
    assert (difference > 0) == bool(arguments)
    assert difference <= 0.3
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == backbone
    assert "num_classes" not in config["model_args"]
    assert config["model_args"]["alpha"] == arguments.get("alpha", 46.0)
    labels = TimmWrapperConfig.from_pretrained(folder).id2label
    assert list(labels.values()) == converted.pretrained_cfg["label_names"] == list("abcde")
    assert (folder / "report.md").read_text() == report.table()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["model"] == backbone
    assert metrics["conversion"]["logits"] == report.logits
    assert metrics["base_model"] == "somebody/cnn"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("resnet_tiny_cifar", {"alpha": float("inf")}, "alpha: got inf"),
        ("resnet_tiny_cifar", {"layers": "nothing"}, "layers: got 'nothing'"),
        ("sa_quadratic_tiny_cifar", {}, "which is a network of attention, expected a CNN"),
    ],
)
def test_a_conversion_is_refused_before_it_is_written(write, tmp_path, name, arguments, said):
    source = make_run(tmp_path / "source", name)
    with pytest.raises(ValueError, match=said):
        write(source, **arguments)
    assert not any((tmp_path / "converted").iterdir())
