"""The networks of the table in variants.py for timm: entry points and default configurations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model_pretrained,
    register_model,
)
from timm.models._pretrained import DefaultCfg
from timm.models.resnet import BasicBlock
from torch import nn

from .network import AttentionNetwork, SANet
from .plain import PlainNet
from .terms import has_fixed_size
from .timm_network import CifarResNet, TimmNetwork, TimmPlainNet, TimmSANet, checkpoint_filter_fn
from .variants import VARIANTS, Variant

CLASSES: dict[type[AttentionNetwork], type[TimmNetwork]] = {
    SANet: TimmSANet,
    PlainNet: TimmPlainNet,
}

INSTALLED = Path(__file__).parents[1] / "weights"
WEIGHTS = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "model_cards"
# NAME or NAME.TAG of all trained models; an installation has the weights of some
TRAINED = sorted(path.parent.name for path in WEIGHTS.glob("*/metrics.json"))
HUB_OWNER = ""  # of the repositories OWNER/NAME on the Hub with these weights; empty as long as there are none
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

default_cfgs: dict[str, DefaultCfg] = {}


def register(variant: Variant) -> Callable[..., nn.Module]:
    """Register a variant with timm, under its name and with its weights."""

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        check_weights(variant.name, pretrained, kwargs)
        network: nn.Module
        if variant.terms:
            network = build_model_with_cfg(
                CLASSES[variant.network],
                variant.name,
                pretrained,
                pretrained_filter_fn=checkpoint_filter_fn,
                feature_cfg={"out_indices": 3, "feature_cls": "getter"},
                **variant.arguments | kwargs,
            )
        else:
            args = {"block": BasicBlock} | variant.sizes | kwargs
            network = build_model_with_cfg(CifarResNet, variant.name, pretrained, **args)
        return as_loaded(network) if pretrained else network

    create.__name__ = create.__qualname__ = variant.name
    create.__doc__ = variant.sentence
    default_cfgs[variant.name] = configurations(variant)
    return register_model(create)


def as_loaded(network: nn.Module) -> nn.Module:
    """Mark all modules as loaded: transformers (5.23) otherwise resets the batch norms of timm backbones."""
    for module in network.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]  # nn.Module declares Tensor | Module
    return network


def configurations(variant: Variant) -> DefaultCfg:
    """timm's configurations of a variant, by the tags of its weights."""
    cfg = RESNET_CFG
    if variant.terms:
        cfg = SANET_CFG | {"fixed_input_size": has_fixed_size(variant.terms)}
    cfgs: dict[str, Any] = {variant.name: cfg}
    cfgs |= {name: cfg | _weights(name) for name in trained(variant)}
    return generate_default_cfgs(cfgs)[variant.name]


def trained(variant: Variant) -> list[str]:
    """Names of the weights of a variant."""
    return [name for name in TRAINED if name.partition(".")[0] == variant.name]


def check_weights(name: str, pretrained: bool, args: dict[str, Any]) -> None:
    """Raise RuntimeError if the model needs weights and they are missing: timm would only log a warning."""
    given = args.get("pretrained_cfg") or args.get("pretrained_cfg_overlay")
    if pretrained and not given and not is_model_pretrained(name):
        expected = ", ".join(filter(is_model_pretrained, TRAINED))
        raise RuntimeError(
            f"pretrained: got True for {name}, which has no weights here, expected one of {expected}; "
            "a checkout has more, in model_cards"
        )


CIFAR_CFG: dict[str, Any] = {
    "num_classes": 10,
    "input_size": (3, 32, 32),
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2023, 0.1994, 0.2010),
    "license": "apache-2.0",
    "origin_url": "https://github.com/epfml/attention-cnn",
}
RESNET_CFG = CIFAR_CFG | {
    "pool_size": (4, 4),
    "first_conv": "conv1",
    "classifier": "fc",
    "paper_ids": "arXiv:1512.03385",
    "paper_name": "Deep Residual Learning for Image Recognition",
}
SANET_CFG = CIFAR_CFG | {
    "pool_size": None,  # with a size, fastai takes the features for (B, D, H, W) and pools them
    "first_conv": "patch_embed",
    "classifier": "head",
    "paper_ids": "arXiv:1911.03584",
    "paper_name": "On the Relationship between Self-Attention and Convolutional Layers",
}


def _weights(name: str) -> dict[str, Any]:
    """timm's source of weights, a file or else a repository on the Hub, and the names of their classes."""
    file = WEIGHTS / name / "model.safetensors"
    return {
        "file": str(file) if file.is_file() else None,
        "hf_hub_id": f"{HUB_OWNER}/{name}" if HUB_OWNER else None,
        "label_names": CIFAR10,
    }


for row in VARIANTS:
    register(row)
__all__ = ["register"]  # timm lists entry points here, but they are no attributes
