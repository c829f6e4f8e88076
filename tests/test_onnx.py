"""ONNX: equal logits for any batch."""

import json

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from model_folders import make_run
from timm.utils.onnx import onnx_export

import sa_zoo
from sa_zoo.publishing import onnx_export as exporter
from sa_zoo.publishing.onnx_export import write_onnx

SIZE = (44, 52)  # enough tokens to go by axes
SMALL = {"embed_dim": 7, "depth": 1, "num_heads": 3, "hidden_dim": 13, "patch_size": 4}
# By axes, by the definition, by taps, and as converted convolutions; tests of test_timm_models.py trace all networks.
NETWORKS = {
    "sa_quadratic_cifar": SMALL | {"img_size": SIZE},
    "sa_content_cifar": SMALL | {"img_size": SIZE},
    "sa_plain_cifar": {
        "embed_dim": (7, 5, 11),
        "depth": 1,
        "num_heads": 3,
        "img_size": (40, 56),
    },
    "mhsa_resnet_tiny_cifar": {"channels": (7, 11, 13, 17)},
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return sa_zoo.open(make_run(folder, "sa_quadratic_tiny_cifar", **SMALL))


@pytest.mark.parametrize("use_dynamo", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_timms_exporter_takes_any_number_of_images(name, use_dynamo, tmp_path):
    torch.manual_seed(0)
    model, path = timm.create_model(name, **NETWORKS[name]).eval(), str(tmp_path / "model.onnx")
    image = (3, *NETWORKS[name].get("img_size", SIZE))
    onnx_export(model, path, input_size=image, batch_size=2, use_dynamo=use_dynamo)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = torch.randn(batch, *image)
        (got,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
        assert np.abs(got - model(x).detach().numpy()).max() < 1e-5


@pytest.mark.parametrize("size", [(52, 44), (32, 32)])
def test_a_file_holds_all_that_running_it_takes(opened, size, tmp_path):
    path = write_onnx(opened, tmp_path / "model.onnx", dynamic_size=size != (32, 32))
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = torch.randn(7, 3, *size)
    (logits,) = runtime.run(["logits"], {"images": images.numpy()})
    assert np.abs(logits - opened.network(images).detach().numpy()).max() < 1e-4
    said = runtime.get_modelmeta().custom_metadata_map
    cfg = opened.network.pretrained_cfg
    for key in ("mean", "std", "input_size", "label_names"):
        assert json.loads(said[key]) == list(cfg[key])
    assert json.loads(said["interpolation"]) == cfg["interpolation"]
    assert [path] == list(tmp_path.iterdir())


def test_nothing_is_written_if_logits_differ(opened, tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    with monkeypatch.context() as patch:
        patch.setattr(exporter, "TOLERANCE", -1.0)
        with pytest.raises(ValueError, match="logits that differ"):
            write_onnx(opened, path)
    content = sa_zoo.open(make_run(tmp_path / "run", "sa_content_tiny_cifar", **SMALL))
    with pytest.raises(ValueError, match="call set_input_size"):
        write_onnx(content, path, dynamic_size=True)  # takes one size
    assert not path.exists()
