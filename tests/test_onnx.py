"""ONNX by timm: equal logits for any batch."""

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from timm.utils import reparameterize_model
from timm.utils.onnx import onnx_export

import sa_zoo

SIZE = (44, 52)  # enough tokens to go by axes
SMALL = {"embed_dim": 7, "depth": 1, "num_heads": 3, "hidden_dim": 13, "patch_size": 4}
# By axes, by the definition, by taps, and as converted convolutions; tests of test_timm_models.py trace all networks.
NETWORKS = {
    "sa_quadratic_cifar": SMALL | {"img_size": SIZE},
    "sa_content_cifar": SMALL | {"img_size": SIZE},
    "sa_plain_cifar": {
        "embed_dim": (7, 5, 11),
        "depth": (1, 1, 1),
        "num_heads": 3,
        "img_size": (40, 56),
    },
    "mhsa_resnet_tiny_cifar": {"channels": (7, 11, 13, 17)},
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters


@pytest.mark.parametrize("use_dynamo", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_timms_exporter_takes_any_number_of_images(name, use_dynamo, tmp_path):
    torch.manual_seed(0)
    model, path = timm.create_model(name, **NETWORKS[name]).eval(), str(tmp_path / "model.onnx")
    if name == "sa_plain_cifar":
        sa_zoo.harden(model)
        model = reparameterize_model(model)
    image = (3, *NETWORKS[name].get("img_size", SIZE))
    onnx_export(model, path, input_size=image, batch_size=2, use_dynamo=use_dynamo)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = torch.randn(batch, *image)
        (got,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
        assert np.abs(got - model(x).detach().numpy()).max() < 1e-5
