"""ONNX and torch.export: equal logits for any batch, and graphs that keep the evaluation by axes."""

import json
import warnings

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from timm.utils import reparameterize_model
from timm.utils.onnx import onnx_export

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.opened import open_model
from sa_zoo.interchange import onnx_export as exporter
from sa_zoo.interchange.onnx_export import write_onnx

H, W = 44, 52  # enough tokens to go by axes
SMALL = {
    "embed_dim": 7,
    "depth": 2,
    "num_heads": 3,
    "hidden_dim": 13,
    "img_size": (H, W),
    "patch_size": 4,
}
T = 11 * 13
# In sizes that tests can afford, tiny variants and other numbers of heads are one network; pyramids have their own test
OTHER_SIZES = ["*_tiny_*", "*_h16_*", "sa_pyramid_*"]
NAMES = timm.list_models("sa_*", module="timm_models", exclude_filters=OTHER_SIZES)
BATCH = {0: torch.export.Dim("batch", min=2, max=97)}


def small(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL).eval()


def session(model: torch.nn.Module, path) -> onnxruntime.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own dependencies
        program = torch.onnx.export(
            model, (torch.randn(2, 3, H, W),), dynamo=True, dynamic_shapes=(BATCH,), verbose=False
        )
        program.save(path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_gives_the_same_logits_for_any_batch(name, tmp_path):
    model = small(name)
    runtime = session(model, tmp_path / "model.onnx")
    for batch in (2, 5):
        x = torch.randn(batch, 3, H, W)
        (got,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
        assert np.abs(got - model(x).detach().numpy()).max() < 1e-5


@pytest.mark.filterwarnings("ignore")  # of the exporter, which torch calls legacy
@pytest.mark.parametrize("name", NAMES)
def test_the_exporter_that_timm_takes_by_default_gives_the_same_logits(name, tmp_path):
    model, path = small(name), tmp_path / "model.onnx"
    onnx_export(model, str(path), input_size=(3, H, W), batch_size=2, use_dynamo=False)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = torch.randn(2, 3, H, W)
    (got,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
    assert np.abs(got - model(x).detach().numpy()).max() < 1e-5


@pytest.mark.parametrize("hidden_dim", [0, 13])
def test_stages_go_to_onnx_with_and_without_feed_forward_layers(hidden_dim, tmp_path):
    torch.manual_seed(0)
    sizes = {"embed_dim": (7, 5, 11), "num_heads": 3, "depth": (1, 2, 1), "img_size": (40, 56)}
    model = timm.create_model("sa_pyramid_cifar", **sizes, hidden_dim=hidden_dim).eval()
    x = torch.randn(5, 3, 40, 56)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own dependencies
        program = torch.onnx.export(
            model, (x[:2],), dynamo=True, dynamic_shapes=(BATCH,), verbose=False
        )
        program.save(tmp_path / "model.onnx")
    runtime = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    (got,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
    assert np.abs(got - model(x).detach().numpy()).max() < 1e-5


@pytest.mark.parametrize("name", ["resnet_tiny_cifar", "mhsa_resnet_tiny_cifar"])
def test_convolutional_models_go_to_onnx_too(name, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(name, channels=(7, 11, 13, 17)).eval()
    runtime = session(model, tmp_path / "model.onnx")
    x = torch.randn(5, 3, H, W)
    (got,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
    assert np.abs(got - model(x).detach().numpy()).max() < 1e-5


def shapes(model: torch.nn.Module) -> list[tuple[int, ...]]:
    """The last two axes of every tensor in the exported graph."""
    program = torch.export.export(model, (torch.randn(2, 3, H, W),), dynamic_shapes=(BATCH,))
    values = [node.meta.get("val") for node in program.graph.nodes]
    return [tuple(value.shape[-2:]) for value in values if isinstance(value, torch.Tensor)]


def test_exported_graphs_hold_no_maps_where_factors_do():
    assert (T, T) in shapes(small("sa_quadratic_gen_cifar"))
    for name in ("sa_quadratic_cifar", "sa_learned_cifar"):
        assert (T, T) not in shapes(small(name))


def test_folded_models_export_without_the_folded_layer():
    folded = reparameterize_model(small("sa_quadratic_cifar"))
    program = torch.export.export(folded, (torch.randn(2, 3, H, W),), dynamic_shapes=(BATCH,))
    assert not any("W_out" in name for name in program.state_dict)
    x = torch.randn(5, 3, H, W)
    assert torch.allclose(program.module()(x), folded(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own dependencies
@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar.long", "resnet_tiny_cifar"])
def test_a_model_is_written_with_all_that_running_it_takes(name, tmp_path):
    opened = open_model(name)
    path = write_onnx(opened, tmp_path / "model.onnx")
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = torch.randn(7, 3, 32, 32)
    (logits,) = runtime.run(["logits"], {"images": images.numpy()})
    assert np.abs(logits - opened.network(images).detach().numpy()).max() < 1e-4
    said = runtime.get_modelmeta().custom_metadata_map
    cfg = opened.network.pretrained_cfg
    for key in ("mean", "std", "input_size", "label_names"):
        assert json.loads(said[key]) == list(cfg[key])
    assert json.loads(said["interpolation"]) == cfg["interpolation"]
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_written_if_onnxruntime_finds_other_logits(tmp_path, monkeypatch):
    opened = open_model("resnet_tiny_cifar")

    def export_of_another(model, *arguments, **options):
        with torch.no_grad():
            model.fc.bias += 1
        onnx_export(model, *arguments, **options)
        with torch.no_grad():
            model.fc.bias -= 1

    monkeypatch.setattr(exporter, "onnx_export", export_of_another)
    with pytest.raises(ValueError, match=r"differ by 1\.0e"):
        write_onnx(opened, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
