"""`local_vit`: any vision transformer of timm, by name, with quadratic scores (positions.py).

timm.create_model("local_vit", vit="vit_tiny_patch16_224", alpha=1.0)
"""

import dataclasses
from typing import Any

from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model,
    model_entrypoint,
    register_model,
)
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from sa_zoo.convolution.timm_backbones import cfg_of
from sa_zoo.vit.positions import add_positions

VIT = "vit_tiny_patch16_224"


def configuration(vit: str) -> Any:
    """timm's configuration of a vision transformer, without its weights."""
    cfg = cfg_of(vit)
    return dataclasses.replace(
        cfg, architecture=None, tag=None, hf_hub_id=None, url=None, file=None
    )


default_cfgs = generate_default_cfgs({"local_vit": configuration(VIT)})


@register_model
def local_vit(
    pretrained: bool = False,
    vit: str = VIT,
    alpha: float = 1.0,
    blocks: list[int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A VisionTransformer of timm with `add_positions(alpha=alpha, blocks=blocks)`."""
    if not is_model(vit):
        raise ValueError(f"vit: got {vit}, expected the name of a VisionTransformer of timm")

    def build(**arguments: Any) -> nn.Module:
        return add_positions(model_entrypoint(vit)(pretrained=False, **arguments), alpha, blocks)

    if not kwargs.get("pretrained_cfg"):
        kwargs["pretrained_cfg"] = configuration(vit).to_dict()
    return build_model_with_cfg(
        build,
        "local_vit",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **kwargs,
    )
