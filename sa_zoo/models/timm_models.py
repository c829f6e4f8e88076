"""timm's face of the paper's networks: one class over SANet, default configurations, one function a variant.

The models of Cordonnier, Loukas, Jaggi (ICLR 2020), Table 1, for CIFAR's 32x32 images; the ResNet18 that they are
compared with; two more score terms that the paper writes down (Eq. 7 and all of Eq. 8); and tiny ones of about equal
cost that a laptop trains in half an hour. No weights are published yet, so no configuration names a file.
"""

import logging
from typing import Any

import torch
from timm.models import (
    build_model_with_cfg,
    checkpoint,
    checkpoint_seq,
    generate_default_cfgs,
    register_model,
    register_notrace_module,
)
from timm.models._features import feature_take_indices
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

from .content_terms import Absolute, Content, Relative
from .network import Block, SANet, checked_pool
from .positions import resized_grid, resized_table
from .terms import GeneralizedQuadratic, Learned, Quadratic

_logger = logging.getLogger(__name__)

# It chooses how to evaluate by what torch.fx cannot know: fx shall call it, not trace into it.
register_notrace_module(Block)


class TimmSANet(SANet):
    """SANet with the rest of timm's contract. Arguments as SANet's; features are (B, H, W, D), one a block."""

    output_fmt = "NHWC"

    def __init__(self, terms: tuple[type[nn.Module], ...], **kwargs: Any) -> None:
        super().__init__(terms, **kwargs)
        self.grad_checkpointing = False
        self.feature_info = [
            {"num_chs": self.embed_dim, "reduction": self.patch_size, "module": f"blocks.{index}"}
            for index in range(len(self.blocks))
        ]

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, C, P H, P W) -> tokens (B, H, W, D)"""
        x = self.embed(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Decay would pull heads to the query pixel (Delta) and make them blur (spread)."""
        return {name for name, _ in self.named_parameters() if name.endswith((".Delta", ".spread"))}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^patch_embed", "blocks": r"^blocks\.(\d+)"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for `num_classes` (0: none), and another pooling unless `global_pool` is None."""
        if global_pool is not None:
            self.global_pool = checked_pool(global_pool)
        self.num_classes = num_classes
        like = self.patch_embed.weight
        self.head = (
            nn.Linear(self.embed_dim, num_classes, device=like.device, dtype=like.dtype)
            if num_classes > 0
            else nn.Identity()
        )

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features of chosen blocks, as timm's models give them.

        Args:
            x: images (B, C, P H, P W).
            indices: the last n blocks if an int, all if None, else these.
            norm: no effect: each block ends in its own norm.
            stop_early: do not run the blocks behind the last chosen one.
            output_fmt: "NCHW" or "NHWC".
            intermediates_only: return the chosen features alone.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt: got {output_fmt!r}, expected 'NCHW' or 'NHWC'")
        chosen, last = feature_take_indices(len(self.blocks), indices)
        x, intermediates = self.embed(x), []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
            if index in chosen:
                intermediates.append(x.permute(0, 3, 1, 2) if output_fmt == "NCHW" else x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks that the features at `indices` do not need, and the head."""
        chosen, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return chosen


class CifarResNet(ResNet):
    """timm's ResNet for small images: a 3x3 stem of stride 1 and no max-pooling (He et al. 2016, as the paper's)."""

    def __init__(self, in_chans: int = 3, device=None, dtype=None, **kwargs: Any) -> None:
        super().__init__(in_chans=in_chans, device=device, dtype=dtype, **kwargs)
        self.conv1 = nn.Conv2d(in_chans, 64, 3, padding=1, bias=False, device=device, dtype=dtype)
        self.maxpool = nn.Identity()
        for index, info in enumerate(self.feature_info):
            info["reduction"] = 2 ** max(index - 1, 0)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Interpolate learned encodings of a checkpoint for another image size to the model's."""
    fitted = dict(state_dict)
    for name, target in model.state_dict().items():
        given = state_dict.get(name)
        if given is None or given.shape == target.shape:
            continue
        if name.endswith((".row", ".col")) and given.shape[1] == target.shape[1]:
            fitted[name] = resized_table(given, (target.shape[0] + 1) // 2)
        elif name.endswith(".P") and given.shape[2] == target.shape[2]:
            fitted[name] = resized_grid(given, target.shape[0], target.shape[1])
        else:
            continue  # for load_state_dict to refuse, with both shapes
        _logger.warning("%s: interpolated from %s to %s", name, tuple(given.shape), tuple(target.shape))
    return fitted


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
    return _cfg(
        pool_size=(4, 4),
        first_conv="conv1",
        classifier="fc",
        paper_ids="arXiv:1512.03385",
        paper_name="Deep Residual Learning for Image Recognition",
        **kwargs,
    )


default_cfgs = generate_default_cfgs(
    {
        "sa_quadratic_cifar": _cfg(),
        "sa_quadratic_h16_cifar": _cfg(),
        "sa_quadratic_gen_cifar": _cfg(),
        "sa_learned_cifar": _cfg(fixed_input_size=True),
        "sa_content_cifar": _cfg(fixed_input_size=True),
        "sa_eq8_cifar": _cfg(fixed_input_size=True),
        "sa_absolute_cifar": _cfg(fixed_input_size=True),
        "sa_quadratic_tiny_cifar": _cfg(pool_size=(8, 8)),
        "sa_learned_tiny_cifar": _cfg(pool_size=(8, 8), fixed_input_size=True),
        "sa_content_tiny_cifar": _cfg(pool_size=(8, 8), fixed_input_size=True),
        "resnet18_cifar": _resnet_cfg(),
        "resnet_tiny_cifar": _resnet_cfg(),
    }
)

TINY = {"patch_size": 4, "embed_dim": 96, "hidden_dim": 192}


def _create_sanet(variant: str, pretrained: bool, args: dict[str, Any]) -> TimmSANet:
    return build_model_with_cfg(
        TimmSANet,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **args,
    )


def _create_resnet(variant: str, pretrained: bool, args: dict[str, Any]) -> CifarResNet:
    return build_model_with_cfg(CifarResNet, variant, pretrained, **args)


@register_model
def sa_quadratic_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic: 9 isotropic Gaussian heads a layer, as many as a 3x3 kernel has pixels (Section 4)."""
    return _create_sanet("sa_quadratic_cifar", pretrained, {"terms": (Quadratic,)} | kwargs)


@register_model
def sa_quadratic_h16_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic with 16 heads (Appendix)."""
    return _create_sanet("sa_quadratic_h16_cifar", pretrained, {"terms": (Quadratic,), "num_heads": 16} | kwargs)


@register_model
def sa_quadratic_gen_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic with any covariance a head (Section 4.1)."""
    return _create_sanet("sa_quadratic_gen_cifar", pretrained, {"terms": (GeneralizedQuadratic,)} | kwargs)


@register_model
def sa_learned_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned: scores by a learned relative encoding of row and column, without content (Section 4.3)."""
    return _create_sanet("sa_learned_cifar", pretrained, {"terms": (Learned,)} | kwargs)


@register_model
def sa_content_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned + content: query-key products added to a learned relative encoding (Section 4.3)."""
    return _create_sanet("sa_content_cifar", pretrained, {"terms": (Content,)} | kwargs)


@register_model
def sa_eq8_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """All four terms of Eq. 8 (Dai et al. 2019): the form that the paper starts from."""
    return _create_sanet("sa_eq8_cifar", pretrained, {"terms": (Relative,)} | kwargs)


@register_model
def sa_absolute_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """Absolute positional encoding (Eq. 7): the contrast, which cannot see shifts alone."""
    return _create_sanet("sa_absolute_cifar", pretrained, {"terms": (Absolute,)} | kwargs)


@register_model
def sa_quadratic_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-quadratic on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet("sa_quadratic_tiny_cifar", pretrained, {"terms": (Quadratic,)} | TINY | kwargs)


@register_model
def sa_learned_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet("sa_learned_tiny_cifar", pretrained, {"terms": (Learned,)} | TINY | kwargs)


@register_model
def sa_content_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> TimmSANet:
    """SA-learned + content on 4x4 patches, 96 channels: for two CPU cores."""
    return _create_sanet("sa_content_tiny_cifar", pretrained, {"terms": (Content,)} | TINY | kwargs)


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """The paper's baseline: ResNet18 with a 3x3 stem and without max-pooling."""
    return _create_resnet("resnet18_cifar", pretrained, {"block": BasicBlock, "layers": (2, 2, 2, 2)} | kwargs)


@register_model
def resnet_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """A ResNet of about the size and cost of sa_quadratic_tiny_cifar: one block a stage, 40 to 192 channels."""
    args = {"block": BasicBlock, "layers": (1, 1, 1, 1), "channels": (40, 56, 104, 192)}
    return _create_resnet("resnet_tiny_cifar", pretrained, args | kwargs)
