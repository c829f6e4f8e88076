"""The paper's networks for timm: default configurations and one function per variant.

The models of Cordonnier, Loukas, Jaggi (ICLR 2020), Table 1, for CIFAR's 32x32 images; variants with Eq. 7, all of
Eq. 8, another start or other terms in late blocks; and tiny models, which a laptop trains in about an hour.
"""

from pathlib import Path
from typing import Any

from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model_pretrained,
    register_model,
)
from timm.models.resnet import BasicBlock

from .terms import TERMS
from .timm_network import CifarResNet, TimmSANet, checkpoint_filter_fn

# Models with weights, NAME or NAME.TAG: in model_cards/ of a checkout; an installation has those that setup.py names.
TRAINED: tuple[str, ...] = ("resnet18_cifar", "resnet_tiny_cifar", "sa_quadratic_tiny_cifar.long")
TRAINED += tuple(
    f"sa_{kind}_tiny_cifar"
    for kind in ("quadratic", "quadratic_kernel", "learned", "mixed", "content")
)
INSTALLED = Path(__file__).parents[1] / "weights"
WEIGHTS = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "model_cards"
HUB_OWNER = ""  # of the repositories OWNER/NAME on the Hub with these weights; empty as long as there are none


def _weights(name: str) -> dict[str, Any]:
    """Where timm finds the weights of a trained model: a file, which it prefers, or a repository on the Hub."""
    file = WEIGHTS / name / "model.safetensors"
    return {
        "file": str(file) if file.is_file() else None,
        "hf_hub_id": f"{HUB_OWNER}/{name}" if HUB_OWNER else None,
    }


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "pool_size": (16, 16),
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2023, 0.1994, 0.2010),
        "first_conv": "patch_embed",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:1911.03584",
        "paper_name": "On the Relationship between Self-Attention and Convolutional Layers",
        "origin_url": "https://github.com/epfml/attention-cnn",
        **kwargs,
    }


def _resnet_cfg(**kwargs: Any) -> dict[str, Any]:
    paper = {
        "paper_ids": "arXiv:1512.03385",
        "paper_name": "Deep Residual Learning for Image Recognition",
    }
    return _cfg(pool_size=(4, 4), first_conv="conv1", classifier="fc", **paper, **kwargs)


CFGS: dict[str, Any] = {
    "sa_quadratic_cifar": _cfg(),
    "sa_quadratic_h16_cifar": _cfg(),
    "sa_quadratic_gen_cifar": _cfg(),
    "sa_quadratic_kernel_cifar": _cfg(),
    "sa_learned_cifar": _cfg(fixed_input_size=True),
    "sa_content_cifar": _cfg(fixed_input_size=True),
    "sa_eq8_cifar": _cfg(fixed_input_size=True),
    "sa_absolute_cifar": _cfg(fixed_input_size=True),
    "sa_mixed_cifar": _cfg(fixed_input_size=True),
    "sa_quadratic_tiny_cifar": _cfg(pool_size=(8, 8)),
    "sa_learned_tiny_cifar": _cfg(pool_size=(8, 8), fixed_input_size=True),
    "sa_content_tiny_cifar": _cfg(pool_size=(8, 8), fixed_input_size=True),
    "sa_quadratic_gen_tiny_cifar": _cfg(pool_size=(8, 8)),
    "sa_quadratic_kernel_tiny_cifar": _cfg(pool_size=(8, 8)),
    "sa_eq8_tiny_cifar": _cfg(pool_size=(8, 8), fixed_input_size=True),
    "sa_absolute_tiny_cifar": _cfg(pool_size=(8, 8), fixed_input_size=True),
    "sa_mixed_tiny_cifar": _cfg(pool_size=(8, 8), fixed_input_size=True),
    "resnet18_cifar": _resnet_cfg(),
    "resnet_tiny_cifar": _resnet_cfg(),
}
default_cfgs = generate_default_cfgs(
    CFGS | {name: CFGS[name.partition(".")[0]] | _weights(name) for name in TRAINED}
)

TINY = {"patch_size": 4, "embed_dim": 96, "hidden_dim": 192}


def _check_weights(variant: str, pretrained: bool, args: dict[str, Any]) -> None:
    given = args.get("pretrained_cfg") or args.get("pretrained_cfg_overlay")
    if pretrained and not given and not is_model_pretrained(variant):
        folder = f"timm.create_model('local-dir:model_cards/{variant}', pretrained=True)"
        where = (
            f"in a checkout, {folder} has its weights"
            if variant in TRAINED
            else "it is not trained yet"
        )
        raise RuntimeError(f"pretrained: got True for {variant}, expected False: {where}")


def _create_sanet(variant: str, pretrained: bool, args: dict[str, Any]) -> TimmSANet:
    _check_weights(variant, pretrained, args)
    return build_model_with_cfg(
        TimmSANet,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **args,
    )


def _create_resnet(variant: str, pretrained: bool, args: dict[str, Any]) -> CifarResNet:
    _check_weights(variant, pretrained, args)
    return build_model_with_cfg(CifarResNet, variant, pretrained, **args)


@register_model
def sa_quadratic_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic: 9 isotropic Gaussian heads per layer, as many as a 3x3 kernel has pixels (Section 4.2)."""
    return _create_sanet("sa_quadratic_cifar", pretrained, {"terms": TERMS["quadratic"]} | kwargs)


@register_model
def sa_quadratic_h16_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic with 16 heads (Appendix)."""
    return _create_sanet(
        "sa_quadratic_h16_cifar",
        pretrained,
        {"terms": TERMS["quadratic"], "num_heads": 16} | kwargs,
    )


@register_model
def sa_quadratic_gen_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic with a full covariance per head (appendix)."""
    return _create_sanet(
        "sa_quadratic_gen_cifar", pretrained, {"terms": TERMS["quadratic_gen"]} | kwargs
    )


@register_model
def sa_quadratic_kernel_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic whose heads start as 3x3 convolutions in the first three blocks (Theorem 1)."""
    return _create_sanet(
        "sa_quadratic_kernel_cifar", pretrained, {"terms": TERMS["quadratic_kernel"]} | kwargs
    )


@register_model
def sa_learned_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned: scores by a learned relative encoding of row and column, without content (Section 4.3)."""
    return _create_sanet("sa_learned_cifar", pretrained, {"terms": TERMS["learned"]} | kwargs)


@register_model
def sa_content_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned + content: query-key products added to a learned relative encoding (Section 4.3)."""
    return _create_sanet("sa_content_cifar", pretrained, {"terms": TERMS["content"]} | kwargs)


@register_model
def sa_eq8_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """All four terms of Eq. 8 (Dai et al. 2019): the form that the paper starts from."""
    return _create_sanet("sa_eq8_cifar", pretrained, {"terms": TERMS["eq8"]} | kwargs)


@register_model
def sa_absolute_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """Absolute positional encoding (Eq. 7), for contrast: scores do not depend on displacements only."""
    return _create_sanet("sa_absolute_cifar", pretrained, {"terms": TERMS["absolute"]} | kwargs)


@register_model
def sa_mixed_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """Quadratic heads in the first half of the blocks, learned + content (Section 4.3) in the second."""
    return _create_sanet("sa_mixed_cifar", pretrained, {"terms": TERMS["mixed"]} | kwargs)


@register_model
def sa_quadratic_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet(
        "sa_quadratic_tiny_cifar", pretrained, {"terms": TERMS["quadratic"]} | TINY | kwargs
    )


@register_model
def sa_learned_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet(
        "sa_learned_tiny_cifar", pretrained, {"terms": TERMS["learned"]} | TINY | kwargs
    )


@register_model
def sa_content_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned + content on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet(
        "sa_content_tiny_cifar", pretrained, {"terms": TERMS["content"]} | TINY | kwargs
    )


@register_model
def sa_quadratic_gen_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic with a full covariance per head on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet(
        "sa_quadratic_gen_tiny_cifar", pretrained, {"terms": TERMS["quadratic_gen"]} | TINY | kwargs
    )


@register_model
def sa_quadratic_kernel_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic that starts as 3x3 convolutions in three blocks; 4x4 patches, 96 channels: for two CPU cores."""
    args = {"terms": TERMS["quadratic_kernel"]} | TINY
    return _create_sanet("sa_quadratic_kernel_tiny_cifar", pretrained, args | kwargs)


@register_model
def sa_eq8_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """All four terms of Eq. 8 on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet("sa_eq8_tiny_cifar", pretrained, {"terms": TERMS["eq8"]} | TINY | kwargs)


@register_model
def sa_absolute_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """Absolute positional encoding on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet(
        "sa_absolute_tiny_cifar", pretrained, {"terms": TERMS["absolute"]} | TINY | kwargs
    )


@register_model
def sa_mixed_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """Quadratic heads in three blocks, learned + content in the next three; 4x4 patches, 96 channels."""
    return _create_sanet(
        "sa_mixed_tiny_cifar", pretrained, {"terms": TERMS["mixed"]} | TINY | kwargs
    )


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """The paper's baseline: ResNet18 with a 3x3 stem and without max-pooling."""
    return _create_resnet(
        "resnet18_cifar", pretrained, {"block": BasicBlock, "layers": (2, 2, 2, 2)} | kwargs
    )


@register_model
def resnet_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """A ResNet of about the size and cost of sa_quadratic_tiny_cifar: one block per stage, 40 to 192 channels."""
    args = {"block": BasicBlock, "layers": (1, 1, 1, 1), "channels": (40, 56, 104, 192)}
    return _create_resnet("resnet_tiny_cifar", pretrained, args | kwargs)
