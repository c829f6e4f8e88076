"""A trained CNN in, a complete folder of its attention network out."""

import pytest
import torch
from hostile import change_config
from model_folders import make_run
from transformers import TimmWrapperConfig

import sa_zoo
from sa_zoo.commands.convert import convert_model

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("resnet_tiny_cifar", "mhsa_resnet_tiny_cifar"), ("test_resnet", "mhsa_network")],
)
@pytest.mark.parametrize("arguments", [{}, {"alpha": 4.0, "layers": "layer4.*"}])
def test_the_folder_loads_as_the_converted_network(tmp_path, name, backbone, arguments):
    source = make_run(tmp_path / "cnn", name, num_classes=5)
    changes = {"label_names": list("abcde"), "pretrained_cfg__license": "cc-by-nc-4.0"}
    change_config(**changes)(source)
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
    ("name", "alpha", "said"),
    [
        ("resnet_tiny_cifar", float("inf"), "alpha: got inf"),
        ("sa_quadratic_tiny_cifar", 46.0, "which is a network of attention, expected a CNN"),
    ],
)
def test_a_conversion_is_refused_before_it_is_written(tmp_path, name, alpha, said):
    source = make_run(tmp_path / "source", name)
    with pytest.raises(ValueError, match=said):
        convert_model(str(source), tmp_path / "converted", alpha=alpha)
    assert not (tmp_path / "converted").exists()
