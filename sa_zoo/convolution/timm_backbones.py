"""The conv-equivalent backbones for timm: CNNs of timm with their convolutions as multi-head self-attention.

Each is an instance of its CNN's class, built by timm's function for it, with layers swapped, and so has timm's whole
interface. Arguments in addition to the CNN's, for `timm.create_model` and for a config's model.args:

    alpha     sharpness of the heads; 46, the paper's, runs as the CNN does; 1 to 5 trains Delta and alpha
    layers    names of the layers to swap, with wildcards, patterns separated by commas; default: all convolutions
    content   True adds content terms behind gates that start at zero

`pretrained=True` loads the CNN's weights from timm's repository and converts them. Files with the CNN's weights are
converted too; files with the backbone's weights load as they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from timm.models import (
    VGG,
    PretrainedCfg,
    adapt_input_conv,
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    list_models,
    model_entrypoint,
    register_model,
    register_notrace_module,
)
from timm.models.convnext import convnext_atto
from timm.models.efficientnet import efficientnet_b0
from timm.models.mobilenetv3 import mobilenetv3_small_100
from timm.models.resnet import resnet18, resnet34, resnet50
from timm.models.vgg import _filter_fn as from_torchvision_vgg
from timm.models.vgg import vgg11_bn
from torch import Tensor, nn

from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.gated import ContentAttention
from sa_zoo.convolution.network_conversion import swap_convolutions
from sa_zoo.convolution.padding import SamePadding
from sa_zoo.convolution.soft import SoftAttention
from sa_zoo.models.timm_models import check_weights

# What these do depends on sizes, which torch.fx knows only symbolically: it has to call them, not trace into them.
for module in (SoftAttention, ContentAttention, SamePadding):
    register_notrace_module(module)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert weights of the CNN to the backbone's; what the CNN lacks (Delta, alpha, ...) is taken from the model.

    A stem for another number of input channels is adapted as in timm.
    """
    converted = from_torchvision_vgg(state_dict) if isinstance(model, VGG) else dict(state_dict)
    own = model.state_dict()
    first = (getattr(model, "pretrained_cfg", {}).get("first_conv") or "").removesuffix(".W_val")
    for name, module in model.named_modules():
        if not isinstance(module, ConvolutionalAttention):
            continue
        if f"{name}.weight" in converted:
            converted[f"{name}.W_val.weight"] = converted.pop(f"{name}.weight")
            if f"{name}.bias" in converted:
                converted[f"{name}.b_out"] = converted.pop(f"{name}.bias")
            for key in own:
                if key.startswith(f"{name}."):
                    converted.setdefault(key, own[key])
        kernel = converted.get(f"{name}.W_val.weight")
        if name == first and kernel is not None and kernel.shape[1] != module.in_channels:
            converted[f"{name}.W_val.weight"] = adapt_input_conv(
                module.in_channels, kernel, kernel.shape[1]
            )
    return converted


def cnn_cfg(name: str) -> PretrainedCfg:
    """timm's configuration of a CNN; RuntimeError if there is none."""
    cfg = get_pretrained_cfg(name, allow_unregistered=False)
    assert cfg is not None
    return cfg


def backbone_cfg(cfg: PretrainedCfg) -> PretrainedCfg:
    """The backbone's configuration from its CNN's, including where to find weights."""
    return dataclasses.replace(
        cfg,
        architecture=None,
        tag=None,
        first_conv=f"{cfg.first_conv}.W_val" if cfg.first_conv else None,
        description=f"{cfg.architecture} with its convolutions as multi-head self-attention",
        paper_ids="arXiv:1911.03584",
        paper_name="On the Relationship between Self-Attention and Convolutional Layers",
    )


resnet18_cifar = model_entrypoint("resnet18_cifar")
resnet_tiny_cifar = model_entrypoint("resnet_tiny_cifar")
CNNS = (
    resnet18,
    resnet34,
    resnet50,
    resnet18_cifar,
    resnet_tiny_cifar,
    vgg11_bn,
    mobilenetv3_small_100,
    efficientnet_b0,
    convnext_atto,
)


def _with_tags(cnn: str) -> list[str]:
    """The CNN's names, one per set of weights, the default set first: timm makes the first one the default."""
    default = cnn_cfg(cnn).tag or ""
    return sorted(
        list_models(cnn, include_tags=True), key=lambda name: name.partition(".")[2] != default
    )


default_cfgs = generate_default_cfgs(
    {
        **{
            f"mhsa_{name}": backbone_cfg(cnn_cfg(name))
            for cnn in CNNS
            for name in _with_tags(cnn.__name__)
        },
        "mhsa_network": dataclasses.replace(
            backbone_cfg(cnn_cfg("resnet18")), hf_hub_id=None, url=None
        ),
    }
)


def _create(
    variant: str,
    cnn: Callable[..., nn.Module],
    pretrained: bool,
    alpha: float = 46.0,
    layers: str = "*",
    content: bool = False,
    feature_levels: int = 5,
    **kwargs: Any,
) -> nn.Module:
    """The CNN built by timm's function `cnn`, with layers swapped."""
    check_weights(variant, cnn.__name__, pretrained, kwargs)

    def swapped(**arguments: Any) -> nn.Module:
        network = cnn(pretrained=False, **arguments)
        swap_convolutions(network, layers, alpha, content)
        return network

    network = build_model_with_cfg(
        swapped,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"feature_cls": "getter", "out_indices": tuple(range(feature_levels))},
        **kwargs,
    )
    if pretrained:
        # Otherwise transformers (5.23) resets the batch norms of any timm backbone that it loads.
        for module in network.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]  # nn.Module declares Tensor | Module
    return network


def _registered(
    cnn: Callable[..., nn.Module],
    description: str,
    feature_levels: int = 5,
) -> Callable[..., nn.Module]:
    """The entry point of the backbone of timm's function `cnn`, registered with timm."""

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _create(create.__name__, cnn, pretrained, feature_levels=feature_levels, **kwargs)

    create.__name__ = f"mhsa_{cnn.__name__}"
    create.__doc__ = f"{description}, as multi-head self-attention."
    return register_model(create)


mhsa_resnet18 = _registered(resnet18, "ResNet18 (He et al. 2016)")
mhsa_resnet34 = _registered(resnet34, "ResNet34 (He et al. 2016)")
mhsa_resnet50 = _registered(resnet50, "ResNet50 (He et al. 2016)")
mhsa_resnet18_cifar = _registered(resnet18_cifar, "resnet18_cifar, the paper's baseline")
mhsa_resnet_tiny_cifar = _registered(resnet_tiny_cifar, "resnet_tiny_cifar, for two CPU cores")
mhsa_vgg11_bn = _registered(
    vgg11_bn, "VGG11 with batch norm (Simonyan and Zisserman 2015)", feature_levels=6
)
mhsa_mobilenetv3_small_100 = _registered(
    mobilenetv3_small_100, "MobileNetV3 small (Howard et al. 2019)"
)
mhsa_efficientnet_b0 = _registered(efficientnet_b0, "EfficientNet B0 (Tan and Le 2019)")
mhsa_convnext_atto = _registered(convnext_atto, "ConvNeXt atto (Liu et al. 2022)", feature_levels=4)


@register_model
def mhsa_network(pretrained: bool = False, cnn: str = "resnet18", **kwargs: Any) -> nn.Module:
    """Any CNN of timm, by name, as multi-head self-attention; used by converted networks that have no own name."""
    if not isinstance(kwargs.get("pretrained_cfg"), dict):
        cfg = backbone_cfg(cnn_cfg(cnn))
        kwargs["pretrained_cfg"] = dataclasses.replace(cfg, architecture="mhsa_network").to_dict()
    return _create("mhsa_network", model_entrypoint(cnn), pretrained, **kwargs)
