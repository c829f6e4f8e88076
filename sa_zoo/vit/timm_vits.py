"""`local_vit`: any vision transformer of timm, by name, with a start as convolution, quadratic scores, or both.

    timm.create_model("local_vit", vit="vit_tiny_patch16_224", start="quadratic", alpha=1.0)

`sa-zoo run train.py --model local_vit --model-kwargs vit=NAME start=quadratic` trains a network, and timm loads its
checkpoint as NAME, without this package. With `alpha`, the network has quadratic scores (positions.py), and needs it.
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
from sa_zoo.vit.start import start_as_convolution

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
    start: str = "",
    alpha: float | None = None,
    blocks: list[int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A VisionTransformer of timm; `start` "quadratic": by `start_as_convolution`; `alpha`: of `add_positions`.

    Both change the given `blocks`, by default all.
    """
    if not is_model(vit):
        raise ValueError(f"vit: got {vit}, expected the name of a VisionTransformer of timm")
    if start not in ("", "quadratic"):
        raise ValueError(f"start: got {start!r}, expected 'quadratic' or ''")

    def build(**arguments: Any) -> nn.Module:
        network = model_entrypoint(vit)(pretrained=False, **arguments)
        # Loaded weights need no start, and libraries that load them build networks without memory.
        loads = pretrained or next(network.parameters()).is_meta
        if start and not loads:
            start_as_convolution(network, blocks=blocks)
        if alpha is not None:
            add_positions(network, alpha, blocks)
        return network

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
