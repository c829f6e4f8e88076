"""The conv-equivalent backbones for timm: CNNs of timm with their convolutions as multi-head self-attention.

Each is an instance of its CNN's class, built by timm's function for it, with layers swapped. So it has timm's whole
interface. Arguments in addition to the CNN's, for `timm.create_model` and for a config's model.args:

    alpha     sharpness of the heads; 46, the paper's, runs as the CNN does; 1 to 5 trains Delta and alpha
    layers    names of the layers to swap, with wildcards, patterns separated by commas; default: all convolutions

`pretrained=True` loads the CNN's weights from timm's repository and converts them. Files with the CNN's weights are
converted too; files with the backbone's weights load as they are.
"""

import dataclasses
from typing import Any

from timm.models import (
    VGG,
    PretrainedCfg,
    adapt_input_conv,
    build_model_with_cfg,
    generate_default_cfgs,
    get_arch_pretrained_cfgs,
    model_entrypoint,
    register_model,
    register_notrace_module,
)
from timm.models._pretrained import DefaultCfg
from timm.models.vgg import _filter_fn as from_torchvision_vgg
from torch import Tensor, nn

from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.network_conversion import swap_convolutions
from sa_zoo.convolution.padding import SamePadding
from sa_zoo.convolution.soft_attention import SoftAttention
from sa_zoo.models.timm_models import as_loaded, check_weights

# The CNNs with a backbone of their own: timm's name and number of feature levels.
CNNS = {
    "resnet18": 5,
    "resnet34": 5,
    "resnet50": 5,
    "resnet18_cifar": 5,
    "resnet_tiny_cifar": 5,
    "vgg11_bn": 6,
    "mobilenetv3_small_100": 5,
    "efficientnet_b0": 5,
    "convnext_atto": 4,
}
default_cfgs: dict[str, DefaultCfg] = {}

# torch.fx has to call these, not trace into them: they depend on sizes, and fx has only symbols for sizes.
for module in (SoftAttention, SamePadding):
    register_notrace_module(module)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert weights of the CNN to the backbone's; missing values (Delta, alpha, ...) are those of the model.

    A stem for another number of input channels is adapted here: timm looks for its name in the CNN.
    """
    converted = from_torchvision_vgg(state_dict) if isinstance(model, VGG) else dict(state_dict)
    first = (getattr(model, "pretrained_cfg", {}).get("first_conv") or "").removesuffix(".W_val")
    for name, module in model.named_modules():
        if not isinstance(module, ConvolutionalAttention):
            continue
        if f"{name}.weight" in converted:
            converted[f"{name}.W_val.weight"] = converted.pop(f"{name}.weight")
            if f"{name}.bias" in converted:
                converted[f"{name}.b_out"] = converted.pop(f"{name}.bias")
            for key, value in module.state_dict(prefix=f"{name}.").items():
                converted.setdefault(key, value)
        kernel = converted.get(f"{name}.W_val.weight")
        if name == first and kernel is not None and kernel.shape[1] != module.in_channels:
            converted[f"{name}.W_val.weight"] = adapt_input_conv(
                module.in_channels, kernel, kernel.shape[1]
            )
    return converted


def cfg_of(name: str) -> PretrainedCfg:
    """timm's default configuration of a model."""
    return next(iter(get_arch_pretrained_cfgs(name).values()))


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


def _create(
    variant: str,
    cnn: str,
    pretrained: bool,
    alpha: float = 46.0,
    layers: str = "*",
    feature_levels: int = 5,
    **kwargs: Any,
) -> nn.Module:
    """The CNN of this name, with layers swapped."""
    check_weights(variant, pretrained, kwargs)

    def swapped(**arguments: Any) -> nn.Module:
        network = model_entrypoint(cnn)(pretrained=False, **arguments)
        swap_convolutions(network, layers, alpha)
        return network

    network = build_model_with_cfg(
        swapped,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"feature_cls": "getter", "out_indices": tuple(range(feature_levels))},
        **kwargs,
    )
    return as_loaded(network) if pretrained else network


def register_backbone(cnn: str, feature_levels: int) -> None:
    """Register a CNN's backbone with timm, with all of the CNN's weights."""

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _create(name, cnn, pretrained, feature_levels=feature_levels, **kwargs)

    name = f"mhsa_{cnn}"
    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{cnn} of timm with its convolutions as multi-head self-attention."
    tagged = get_arch_pretrained_cfgs(cnn)  # by names with tags of weights, the default first
    default_cfgs.update(
        generate_default_cfgs({f"mhsa_{name}": backbone_cfg(cfg) for name, cfg in tagged.items()})
    )
    register_model(create)


for row in CNNS.items():
    register_backbone(*row)
# timm lists entry points here, which are not attributes of this module
__all__ = ["register_backbone"]
network_cfg = dataclasses.replace(backbone_cfg(cfg_of("resnet18")), hf_hub_id=None, url=None)
default_cfgs.update(generate_default_cfgs({"mhsa_network": network_cfg}))


@register_model
def mhsa_network(pretrained: bool = False, cnn: str = "resnet18", **kwargs: Any) -> nn.Module:
    """Any CNN of timm, by name, as multi-head self-attention; used by converted networks that have no own name."""
    if not kwargs.get("pretrained_cfg"):
        kwargs["pretrained_cfg"] = backbone_cfg(cfg_of(cnn))
    return _create("mhsa_network", cnn, pretrained, **kwargs)
