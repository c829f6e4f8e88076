"""ONNX: equal logits for any batch."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from timm.utils.onnx import onnx_export

import sa_zoo
from sa_zoo.publishing import onnx_export as exporter
from sa_zoo.publishing.onnx_export import write_onnx

H, W = 44, 52  # enough tokens to go by axes
SMALL = {"embed_dim": 7, "depth": 2, "num_heads": 3, "hidden_dim": 13, "patch_size": 4}
SMALL |= {"img_size": (H, W)}
PLAIN = {"embed_dim": (7, 5, 11), "depth": (1, 2, 1), "num_heads": 3, "img_size": (40, 56)}
# In sizes that tests can afford, tiny variants, other numbers of heads and other starts are one network.
SAME = ["*_tiny_*", "*_h16_*", "*_kernel_*", "sa_plain_*"]
NETWORKS = dict.fromkeys(timm.list_models("sa_*", exclude_filters=SAME), SMALL)
NETWORKS |= {"sa_plain_cifar": PLAIN, "mhsa_resnet_tiny_cifar": {"channels": (7, 11, 13, 17)}}
CONTENT = Path(__file__).parents[1] / "model_cards" / "sa_content_tiny_cifar"


def small(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **NETWORKS[name]).eval()


@pytest.mark.filterwarnings("ignore")  # of the exporters
@pytest.mark.parametrize("use_dynamo", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_timms_exporter_takes_any_number_of_images(name, use_dynamo, tmp_path):
    model, path = small(name), str(tmp_path / "model.onnx")
    image = (3, *NETWORKS[name].get("img_size", (H, W)))
    onnx_export(model, path, input_size=image, batch_size=2, use_dynamo=use_dynamo)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = torch.randn(batch, *image)
        (got,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
        assert np.abs(got - model(x).detach().numpy()).max() < 1e-5


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own dependencies
@pytest.mark.parametrize(
    ("name", "size"),
    [("sa_quadratic_tiny_cifar.long", (52, 44)), ("resnet_tiny_cifar", (32, 32))],
)
def test_a_file_holds_all_that_running_it_takes(name, size, tmp_path):
    opened = sa_zoo.open(name)
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


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_written_if_logits_differ(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    monkeypatch.setattr(exporter, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="logits that differ"):
        write_onnx(sa_zoo.open("resnet_tiny_cifar"), path)
    with pytest.raises(ValueError, match="call set_input_size"):
        write_onnx(sa_zoo.open(CONTENT), path, dynamic_size=True)  # takes one size
    assert not list(tmp_path.iterdir())
