"""timm_backbones.py: the conv-equivalent backbones are their CNNs, for timm and for transformers."""

import pytest
import timm
import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoBackbone,
    AutoModelForImageClassification,
    TimmBackbone,
    TimmBackboneConfig,
)
from transformers.models.auto import auto_factory

from sa_zoo.convolution.convolutional import HardAttention
from sa_zoo.convolution.soft_attention import SoftAttention
from sa_zoo.convolution.timm_backbones import CNNS, checkpoint_filter_fn
from sa_zoo.folders.write import write_timm_files

TINY = "mhsa_resnet_tiny_cifar"


def trained(name, **arguments):
    """A network whose batch norms and biases are not at their initial values."""
    torch.manual_seed(0)
    network = timm.create_model(name, **arguments).eval()
    for key, tensor in network.state_dict().items():
        if tensor.ndim == 1 and not key.endswith("alpha"):
            tensor.uniform_(0.5, 1.5)
    return network


def saved(network, path):
    """The weights as a file, as timm is told of it."""
    weights = {name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(weights, path, {"format": "pt"})
    return {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}


def images(network):
    size = network.pretrained_cfg["input_size"][1:]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, *(min(side, 64) for side in size), generator=generator)


def kinds(network):
    return {type(module) for module in network.modules()}


def test_backbones_have_their_cnns_weights_and_licence():
    assert {f"mhsa_{cnn}" for cnn in CNNS} | {"mhsa_network"} == set(timm.list_models("mhsa_*"))
    for cnn in CNNS:
        for name in [cnn, *timm.list_models(cnn, include_tags=True)]:
            mine, other = (timm.get_pretrained_cfg(prefix + name) for prefix in ("mhsa_", ""))
            for key in ("tag", "hf_hub_id", "license", "mean"):
                assert getattr(mine, key) == getattr(other, key)
            assert mine.first_conv == f"{other.first_conv}.W_val"


@pytest.mark.parametrize("name", ["resnet_tiny_cifar", "mobilenetv3_small_100", "convnext_atto"])
def test_a_file_of_the_cnn_becomes_the_same_function(name, tmp_path):
    cnn = trained(name)
    weights = saved(cnn, tmp_path / "cnn.safetensors")
    backbone = timm.create_model(f"mhsa_{name}", **weights).eval()
    x = images(cnn)
    assert type(backbone) is type(cnn) and nn.Conv2d not in kinds(backbone)
    assert torch.equal(backbone(x), cnn(x))
    features = timm.create_model(f"mhsa_{name}", features_only=True, **weights).eval()
    expected = cnn.forward_intermediates(x, intermediates_only=True)
    assert features.feature_info.channels() == [level.shape[1] for level in expected]
    torch.testing.assert_close(features(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layers", ["*", "layer4.*"])
def test_classes_channels_and_layers_of_ones_own(layers, tmp_path):
    cnn = trained("resnet_tiny_cifar")
    arguments = {"in_chans": 1, "num_classes": 7, "layers": layers}
    backbone = timm.create_model(
        TINY, **saved(cnn, tmp_path / "cnn.safetensors"), **arguments
    ).eval()
    x = torch.randn(2, 1, 32, 32)
    expected = cnn.forward_features(x.expand(-1, 3, -1, -1))
    assert torch.allclose(backbone.forward_features(x), expected, atol=1e-4)
    assert backbone(x).shape == (2, 7)
    backbone.reset_classifier(0, "")
    assert backbone(x).shape == (2, 192, 4, 4)


def test_torchvisions_vgg_is_read_as_timm_reads_it():
    """By names and shapes alone: the network itself has 133 million parameters."""
    with torch.device("meta"):
        backbone, cnn = (timm.create_model(name) for name in ("mhsa_vgg11_bn", "vgg11_bn"))
    given = {}
    theirs = {"head.fc": 6, "pre_logits.fc1": 0, "pre_logits.fc2": 3}
    for key, value in cnn.state_dict().items():
        layer, _, last = key.rpartition(".")
        flat = layer in theirs and value.ndim > 1
        name = f"classifier.{theirs[layer]}" if layer in theirs else layer
        given[f"{name}.{last}"] = value.flatten(1) if flat else value
    found = checkpoint_filter_fn(given, backbone)
    shapes = [{key: x.shape for key, x in each.items()} for each in (found, backbone.state_dict())]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("alpha", [46.0, 4.0])
def test_timm_traces_features_of_backbones(alpha):
    traced = timm.create_model(TINY, alpha=alpha, features_only=True, feature_cls="fx")
    features = traced(torch.randn(2, 3, 32, 32))
    assert [feature.shape[-1] for feature in features] == [32, 32, 16, 8, 4]


def test_transformers_keeps_the_batch_norms_of_trained_networks(tmp_path):
    plain = trained("sa_plain_tiny_cifar", embed_dim=(7, 5, 11))
    write_timm_files(tmp_path, plain)
    backbone = TimmBackbone.from_pretrained(f"local-dir:{tmp_path}", out_indices=[-1]).eval()
    (found,) = backbone(images(plain)).feature_maps
    assert torch.equal(found, plain.forward_features(images(plain)).permute(0, 3, 1, 2))


def test_transformers_loads_a_backbone_through_its_wrappers(tmp_path, monkeypatch):
    backbone = trained(TINY, num_classes=7)
    write_timm_files(tmp_path, backbone)
    x = images(backbone)
    classifier = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier(x).logits, backbone(x))
    for owner in (HfApi, auto_factory):  # where AutoBackbone asks whether it is a name of timm
        monkeypatch.setattr(owner, "repo_exists", lambda *_: False, raising=False)
    levels = backbone.forward_intermediates(x, intermediates_only=True)
    for face in (TimmBackbone, AutoBackbone):
        features = face.from_pretrained(f"local-dir:{tmp_path}", out_indices=[1, 4]).eval()
        for found, level in zip(features(x).feature_maps, (1, 4), strict=True):
            assert torch.equal(found, levels[level])
    # The wrapper's configuration keeps other arguments to itself; those of the call reach timm.
    config = TimmBackboneConfig(backbone=TINY, alpha=4.0)
    assert HardAttention in kinds(AutoBackbone.from_config(config))
    assert SoftAttention in kinds(AutoBackbone.from_config(config, alpha=4.0))
