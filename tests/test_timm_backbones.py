"""timm_backbones.py: the conv-equivalent backbones are their CNNs, for timm and for transformers."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import set_layer_config
from timm.models._hub import save_config_for_hf

import sa_zoo
from sa_zoo.convolution.convolutional import ConvolutionalAttention, HardAttention
from sa_zoo.convolution.gated import ContentAttention
from sa_zoo.convolution.soft import SoftAttention
from sa_zoo.convolution.timm_backbones import CNNS, checkpoint_filter_fn

SMALL = ["resnet_tiny_cifar", "mobilenetv3_small_100", "convnext_atto"]


def trained(name, **arguments):
    """A network whose batch norms and biases are not at their initial values."""
    torch.manual_seed(0)
    network = timm.create_model(name, **arguments).eval()
    for key, tensor in network.state_dict().items():
        if tensor.ndim == 1 and not key.endswith("alpha"):
            tensor.uniform_(0.5, 1.5)
    return network


def saved(network, folder):
    """A CNN as a file."""
    save_file(
        {key: value.contiguous() for key, value in network.state_dict().items()},
        folder / "cnn.safetensors",
    )
    return {"file": str(folder / "cnn.safetensors")}


def images(network, batch=2):
    torch.manual_seed(1)
    return torch.randn(
        batch, 3, *[min(side, 64) for side in network.pretrained_cfg["input_size"][1:]]
    )


def test_every_backbone_is_registered_with_its_cnns_weights_and_licence():
    assert {f"mhsa_{cnn}" for cnn, *_ in CNNS} | {"mhsa_network"} == set(timm.list_models("mhsa_*"))
    for cnn, *_ in CNNS:
        for name in timm.list_models(cnn, include_tags=True):
            mine, other = (timm.get_pretrained_cfg(prefix + name) for prefix in ("mhsa_", ""))
            assert (mine.hf_hub_id, mine.license, mine.mean) == (
                other.hf_hub_id,
                other.license,
                other.mean,
            )
            assert mine.first_conv == f"{other.first_conv}.W_val"
        assert timm.get_pretrained_cfg(f"mhsa_{cnn}").tag == timm.get_pretrained_cfg(cnn).tag


@pytest.mark.parametrize("name", SMALL)
def test_a_file_of_the_cnn_becomes_the_same_function(name, tmp_path):
    cnn = trained(name)
    backbone = timm.create_model(
        f"mhsa_{name}", pretrained=True, pretrained_cfg_overlay=saved(cnn, tmp_path)
    ).eval()
    x = images(cnn)
    assert type(backbone) is type(cnn)
    assert torch.equal(backbone(x), cnn(x))
    assert sum(p.numel() for p in backbone.parameters()) == sum(p.numel() for p in cnn.parameters())
    assert not any(isinstance(module, torch.nn.Conv2d) for module in backbone.modules())
    assert torch.equal(backbone.forward_features(x), cnn.forward_features(x))
    overlay = saved(cnn, tmp_path)
    features = timm.create_model(
        f"mhsa_{name}", features_only=True, pretrained=True, pretrained_cfg_overlay=overlay
    )
    expected = cnn.forward_intermediates(x, intermediates_only=True)
    for mine, other, channels in zip(
        features.eval()(x), expected, features.feature_info.channels(), strict=True
    ):
        assert torch.equal(mine, other) and mine.shape[1] == channels


def test_a_file_of_the_backbone_loads_as_it_is(tmp_path):
    arguments = {"alpha": 3.0, "layers": "layer4.*", "content": True}
    backbone = timm.create_model("mhsa_resnet_tiny_cifar", **arguments).eval()
    again = timm.create_model(
        "mhsa_resnet_tiny_cifar",
        pretrained=True,
        pretrained_cfg_overlay=saved(backbone, tmp_path),
        **arguments,
    )
    assert all(
        torch.equal(value, again.state_dict()[key]) for key, value in backbone.state_dict().items()
    )
    with pytest.raises(
        RuntimeError, match="expected exact ones in a layer that was built for a large alpha"
    ):
        soft = timm.create_model("mhsa_resnet_tiny_cifar", alpha=3.0)
        timm.create_model(
            "mhsa_resnet_tiny_cifar", pretrained=True, pretrained_cfg_overlay=saved(soft, tmp_path)
        )


def test_classes_channels_and_layers_of_ones_own(tmp_path):
    cnn = trained("resnet_tiny_cifar")
    overlay = saved(cnn, tmp_path)
    x = torch.randn(2, 1, 32, 32)
    expected = cnn.forward_features(x.expand(-1, 3, -1, -1))
    for layers in ("*", "layer4.*"):
        arguments = {
            "in_chans": 1,
            "num_classes": 7,
            "layers": layers,
            "pretrained_cfg_overlay": overlay,
        }
        backbone = timm.create_model("mhsa_resnet_tiny_cifar", pretrained=True, **arguments).eval()
        assert torch.allclose(backbone.forward_features(x), expected, atol=1e-4)
        assert backbone(x).shape == (2, 7)
    backbone.reset_classifier(0, "")
    assert backbone(x).shape == (2, 192, 4, 4)


def test_torchvisions_vgg_is_read_as_timm_reads_it():
    """The state dict's names and shapes alone: the network itself has 133 million parameters."""
    with torch.device("meta"):
        backbone = timm.create_model("mhsa_vgg11_bn")
    own = backbone.state_dict()
    names = {
        "head.fc": "classifier.6",
        "pre_logits.fc1": "classifier.0",
        "pre_logits.fc2": "classifier.3",
    }
    layers = {
        name
        for name, module in backbone.named_modules()
        if isinstance(module, ConvolutionalAttention)
    }
    given = {}
    for key, value in own.items():
        layer, _, last = key.rpartition(".")
        layer, last = layer.removesuffix(".W_val"), {"b_out": "bias"}.get(last, last)
        if layer in layers and last in ("Delta", "alpha"):
            continue
        flat = value.flatten(1) if layer in names and value.ndim > 1 else value
        given[f"{names.get(layer, layer)}.{last}"] = flat
    assert "classifier.0.weight" in given and given["classifier.0.weight"].ndim == 2
    converted = checkpoint_filter_fn(given, backbone)
    assert {key: value.shape for key, value in converted.items()} == {
        key: value.shape for key, value in own.items()
    }


@pytest.mark.parametrize(
    "arguments",
    [{}, {"alpha": 4.0}, {"alpha": 4.0, "layers": "layer3.*,layer4.*", "content": True}],
)
def test_every_parameter_gets_a_gradient(arguments):
    backbone = timm.create_model("mhsa_resnet_tiny_cifar", **arguments).train()
    backbone(torch.randn(2, 3, 32, 32)).mean().backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
    kinds = {type(module) for module in backbone.modules()}
    assert (SoftAttention in kinds) == (arguments == {"alpha": 4.0})
    assert (ContentAttention in kinds) == ("content" in arguments)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("how", ["script", "fx", "compile", "export"])
@pytest.mark.parametrize("alpha", [46.0, 4.0])
def test_backbones_script_trace_compile_and_export(alpha, how):
    with set_layer_config(scriptable=True):
        backbone = timm.create_model("mhsa_resnet_tiny_cifar", alpha=alpha).eval()
    x = torch.randn(2, 3, 32, 32)
    if how == "script":
        other = torch.jit.script(backbone)
    elif how == "fx":
        features = timm.create_model(
            "mhsa_resnet_tiny_cifar", alpha=alpha, features_only=True, feature_cls="fx"
        )
        assert [feature.shape[-1] for feature in features(x)] == [32, 32, 16, 8, 4]
        return
    elif how == "compile":
        torch.compiler.reset()
        other = torch.compile(backbone, fullgraph=True, backend="eager")
    else:
        other = torch.export.export(backbone, (x,)).module()
    assert torch.allclose(other(x), backbone(x), atol=1e-5)


def test_any_cnn_of_timm_has_a_backbone_without_a_name_of_its_own():
    cnn = trained("test_efficientnet")
    backbone = timm.create_model(
        "mhsa_network", cnn="test_efficientnet", num_classes=cnn.num_classes
    ).eval()
    backbone.load_state_dict(checkpoint_filter_fn(cnn.state_dict(), backbone))
    x = images(cnn)
    assert torch.equal(backbone(x), cnn(x))
    assert backbone.pretrained_cfg["architecture"] == "mhsa_network"
    assert backbone.pretrained_cfg["input_size"] == cnn.pretrained_cfg["input_size"]


def test_transformers_keeps_the_batch_norms_of_trained_networks(tmp_path):
    from transformers import TimmBackbone

    pyramid = timm.create_model("sa_pyramid_tiny_cifar", embed_dim=(7, 5, 11)).eval()
    for norm in pyramid.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(norm.running_mean)
    arguments = {"embed_dim": (7, 5, 11)}
    timm.models.save_for_hf(pyramid, tmp_path, model_args=arguments, safe_serialization=True)
    for name in ("resnet_tiny_cifar", f"local-dir:{tmp_path}"):
        network = timm.create_model(name, pretrained=True).eval()
        x = images(network)
        last = network.forward_intermediates(x, intermediates_only=True)[-1]
        backbone = TimmBackbone.from_pretrained(name, out_indices=[-1]).eval()
        assert torch.equal(backbone(x).feature_maps[0], last)


def test_transformers_loads_a_backbone_through_its_wrappers(tmp_path, monkeypatch):
    from huggingface_hub import HfApi
    from transformers import (
        AutoBackbone,
        AutoModelForImageClassification,
        TimmBackbone,
        TimmBackboneConfig,
    )
    from transformers.models.auto import auto_factory

    backbone = trained("mhsa_resnet_tiny_cifar", num_classes=7)
    weights = {key: value.contiguous() for key, value in backbone.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    save_config_for_hf(backbone, str(tmp_path / "config.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"].pop("num_classes")
    (tmp_path / "config.json").write_text(json.dumps(config))
    x = images(backbone)
    classifier = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier(x).logits, backbone(x))
    for owner in (HfApi, auto_factory):  # where AutoBackbone asks whether it is a name of timm
        monkeypatch.setattr(owner, "repo_exists", lambda *_: False, raising=False)
    for face in (TimmBackbone, AutoBackbone):
        features = face.from_pretrained(f"local-dir:{tmp_path}", out_indices=[1, 4]).eval()
        assert isinstance(features, TimmBackbone)
        for mine, level in zip(features(x).feature_maps, (1, 4), strict=True):
            assert torch.equal(
                mine, backbone.forward_intermediates(x, intermediates_only=True)[level]
            )
    by_name = AutoBackbone.from_config(TimmBackboneConfig(backbone="mhsa_resnet_tiny_cifar"))
    assert [tuple(level.shape[1:]) for level in by_name(x).feature_maps] == [(192, 4, 4)]
    # The wrapper's configuration keeps other arguments to itself; those of the call reach timm.
    config = TimmBackboneConfig(backbone="mhsa_resnet_tiny_cifar", alpha=4.0)
    kinds = {type(module) for module in AutoBackbone.from_config(config).modules()}
    assert HardAttention in kinds and SoftAttention not in kinds
    kinds = {type(module) for module in AutoBackbone.from_config(config, alpha=4.0).modules()}
    assert SoftAttention in kinds and HardAttention not in kinds


def test_the_backbone_of_a_detector_of_transformers_is_converted_in_place_by_layer_names():
    from transformers import DetrConfig, DetrForObjectDetection, TimmBackboneConfig

    torch.manual_seed(0)
    backbone = TimmBackboneConfig(backbone="resnet18", out_indices=[4])
    sizes = {"d_model": 28, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 7}
    sizes |= {"encoder_ffn_dim": 37, "decoder_ffn_dim": 41, "num_labels": 5}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    detr = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **sizes)).eval()
    images = torch.randn(1, 3, 67, 71)
    converted, report = sa_zoo.convert(detr, layers="*layer4*", alpha=4.0, example=images)
    names = {name for name, module in converted.named_modules() if type(module) is SoftAttention}
    assert names == {row.name for row in report.layers} and len(names) == 5
    assert all("layer4" in name for name in names)
    assert converted(images).logits.shape == detr(images).logits.shape == (1, 7, 6)
    assert 0 < report.logits < 0.2
